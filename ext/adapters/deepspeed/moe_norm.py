"""A gradient norm for clipping that counts each expert once, whatever the expert-parallel size.

DeepSpeed averages the norms of ranks with different experts, so that one run is clipped differently at every
ep_size (DeepSpeed issue 8475), and with a pipeline counts only the first stage's parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_group, bwc_pipeline_parallel_world_size
from torch import Tensor


def count_experts_once(engine: Any) -> None:
    """Replace the norm where DeepSpeed's is wrong: fp32 without ZeRO, and fp16 with an unfused optimizer.

    ZeRO, BF16_Optimizer and the fused FP16_Optimizer sum over expert-parallel ranks themselves.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        _correct_unfused(optimizer, engine.mpu)
    else:
        engine.clip_fp32_gradients = lambda: _clip(engine)


def global_norm(parameters: Iterable[tuple[Any, Tensor | None]], mpu: Any = None) -> Tensor:
    """The norm of all gradients of the model, each parameter once. Collective over its replicas and stages.

    Args:
        parameters: the model's parameters on this rank, each with its gradient, averaged over replicas.
        mpu: DeepSpeed's grid, for a pipeline.
    """
    squares: dict[str | None, list[Tensor]] = defaultdict(list)
    device = None
    for parameter, grad in parameters:
        device = parameter.device
        if grad is not None and not getattr(parameter, "ds_pipe_replicated", False):
            squares[parameter.group_name if is_moe_param(parameter) else None].append(grad.detach().float().norm())
    total = torch.zeros((), device=device)
    # Groups in the same order on every rank; a group without gradients here may have some elsewhere.
    for name in [None, *sorted(groups._get_expert_parallel_group_dict())]:
        part = torch.stack(squares[name]).square().sum() if squares[name] else torch.zeros_like(total)
        if name is not None:
            dist.all_reduce(part, group=groups._get_expert_parallel_group(name))
        total = total + part
    if mpu is not None and bwc_pipeline_parallel_world_size(mpu) > 1:
        dist.all_reduce(total, group=bwc_pipeline_parallel_group(mpu))
    return total.sqrt()


def _clip(engine: Any) -> None:
    parameters = list(engine.module.parameters())
    norm = global_norm([(p, p.grad) for p in parameters], engine.mpu)
    engine._global_grad_norm = norm
    scale = (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))


def _correct_unfused(optimizer: FP16_UnfusedOptimizer, mpu: Any) -> None:
    host = optimizer.unscale_and_clip_grads

    def unscale_and_clip(total_norm: float, apply_scale: bool = True) -> Any:
        pairs = zip(sum(optimizer.fp16_groups, []), sum(optimizer.fp32_groups, []), strict=True)
        norm = float(global_norm([(low, high.grad) for low, high in pairs], mpu))
        optimizer._global_grad_norm = norm
        return host(norm, apply_scale)

    optimizer.unscale_and_clip_grads = unscale_and_clip
