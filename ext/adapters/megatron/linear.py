"""Weight gradients of Megatron's parallel linear layers that can wait for W.

Megatron computes both gradients in one autograd Function, which `WeightGradQueue` cannot look into. This one does the
same arithmetic and communication in I, and in W what is left: with sequence parallelism that includes gathering the
inputs again, so that only this rank's part of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor, nn

from ext.runtime.split_backward import WeightGradQueue, active_queue

_FUSED_ELSEWHERE = ("transformer_engine.", "megatron.core.extensions.")


def make_deferrable(model: nn.Module) -> None:
    """Let every parallel linear layer of the model defer where a `WeightGradQueue` intercepts it. Idempotent."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and "_forward_impl" not in vars(module):
            module._forward_impl = partial(_forward, module._forward_impl)


def undeferrable_layers(model: nn.Module) -> list[str]:
    """Classes of the model's layers that compute their weight gradients where nothing can defer them."""
    return sorted(
        type(module).__name__
        for module in {type(m): m for m in model.modules()}.values()
        if type(module).__module__.startswith(_FUSED_ELSEWHERE)
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )


def _forward(
    host: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    **others: Any,
) -> Tensor:
    queue = active_queue()
    if queue is None or not torch.is_grad_enabled() or not (weight.requires_grad and weight.is_leaf):
        settings = {
            "gradient_accumulation_fusion": gradient_accumulation_fusion,
            "allreduce_dgrad": allreduce_dgrad,
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
        }
        return host(input=input, weight=weight, bias=bias, **settings, **others)
    anchor = torch.empty(0, requires_grad=True)
    call = _Call(queue, weight, allreduce_dgrad, tp_group if sequence_parallel else None, tp_group)
    return _ParallelLinear.apply(call, anchor, input, bias)  # type: ignore[return-value]


class _Call:
    """What the operation needs and autograd must not see: its weight is no input of the node, see `WeightGradQueue`."""

    def __init__(
        self, queue: WeightGradQueue, weight: Tensor, all_reduce: bool, sequence_group: Any, group: Any
    ) -> None:
        self.queue, self.weight, self.all_reduce = queue, weight, all_reduce
        self.sequence_group, self.group = sequence_group, group

    def gathered(self, x: Tensor) -> Tensor:
        """The inputs of all ranks where they are spread over the sequence."""
        if self.sequence_group is None:
            return x
        whole = x.new_empty((x.shape[0] * self.sequence_group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.sequence_group)
        return whole

    def add_weight_grad(self, grad: Tensor, x: Tensor) -> None:
        """Hand the weight's gradient to autograd at the parameter, where Megatron's hooks wait for it."""
        with torch.no_grad():
            rows, inputs = prepare_input_tensors_for_wgrad_compute(grad, self.gathered(x))
            weight_grad = rows.t().matmul(inputs).to(self.weight.dtype)
        torch.autograd.backward(self.weight, weight_grad)


class _ParallelLinear(torch.autograd.Function):
    """``x W^T + b`` with x ``(seq, batch, in)`` and W ``(out, in)``, both possibly one rank's part."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x)
        output = torch.matmul(call.gathered(x), call.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        call: _Call = ctx.call
        x_grad = None
        if ctx.needs_input_grad[2]:
            x_grad = grad.matmul(call.weight)
            if call.sequence_group is not None:
                part = torch.empty_like(x)
                dist.reduce_scatter_tensor(part, x_grad, group=call.sequence_group)
                x_grad = part
            elif call.all_reduce:
                dist.all_reduce(x_grad, group=call.group)
        bias_grad = grad.reshape(-1, grad.shape[-1]).sum(dim=0) if ctx.needs_input_grad[3] else None
        # A gradient that the forward takes for itself, by torch.autograd.grad, asks for no parameter's.
        if torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            call.queue.defer(partial(call.add_weight_grad, grad.detach(), x.detach()))
        return None, None, x_grad, bias_grad
