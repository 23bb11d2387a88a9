"""A gradient norm for clipping that counts each expert once, whatever the expert-parallel size.

DeepSpeed averages the norms of ranks with different experts, so that one run is clipped differently at every
ep_size (DeepSpeed issue 8475); with a pipeline it counts only the first stage's parameters, and waits forever where
stages differ in having experts, since they then add up a different number of norms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_pipeline_parallel_group, bwc_pipeline_parallel_world_size
from torch import Tensor


def count_experts_once(engine: Any) -> None:
    """Give the engine's optimizer a norm that is right for experts, with the same collectives on every rank.

    The fused FP16_Optimizer and ZeRO with CPU offload keep DeepSpeed's, which is right but for uneven stages.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        _correct_unfused(optimizer, engine.mpu)
    elif isinstance(optimizer, BF16_Optimizer):
        _complete_bf16(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        if not optimizer.cpu_offload:
            optimizer.scaled_global_norm = lambda norm_type=2: _zero_norm(optimizer, engine.mpu)
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
    return _over_stages(total, mpu).sqrt()


def _over_stages(total: Tensor, mpu: Any) -> Tensor:
    if mpu is not None and bwc_pipeline_parallel_world_size(mpu) > 1:
        dist.all_reduce(total, group=bwc_pipeline_parallel_group(mpu))
    return total


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


def _zero_norm(optimizer: DeepSpeedZeroOptimizer, mpu: Any) -> Tensor:
    """Infinite where a gradient is not finite, as DeepSpeed has it. Every partition lies on one rank only."""
    total = torch.zeros((), device=optimizer.device)
    for index in range(len(optimizer.bit16_groups)):
        gradients = [g for g in optimizer.averaged_gradients[index] if not getattr(g, "_zero_padding", False)]
        scale = optimizer.loss_scale if optimizer._muon_update_lacks_loss_scale(index) else 1.0
        for gradient, parameter in zip(gradients, optimizer.params_in_partition[index], strict=False):
            if not getattr(parameter, "ds_pipe_replicated", False):
                total = total + (gradient.detach().float().norm() * scale).square()
    dist.all_reduce(total, group=optimizer.dp_process_group)
    norm = _over_stages(total, mpu).sqrt()
    return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, float("inf")))


def _complete_bf16(optimizer: BF16_Optimizer) -> None:
    """Name every expert group of the model, also those without a gradient here, so that all ranks add them up."""
    host = optimizer.get_grads_for_norm
    if not optimizer.has_moe_layers:
        optimizer.has_moe_layers, optimizer.expert_gradients = True, {}

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return host(for_clipping=True)
        dense, experts = host()
        nothing = [torch.zeros(1, device=optimizer.bf16_groups[0][0].device)]
        return dense, {name: experts.get(name, nothing) for name in sorted(groups._get_expert_parallel_group_dict())}

    optimizer.get_grads_for_norm = get_grads_for_norm
