"""Megatron's parallel linear layers where their weight gradients can wait for W, and where somebody listens.

Megatron computes both gradients in one autograd Function, which `WeightGradQueue` cannot look into. The one here does
the same arithmetic and communication in I, and in W what is left: with sequence parallelism that includes gathering the
inputs again, so that only this rank's part of them is kept.

`announced` tells a listener (`ext.comm.tensor_parallel.hooks`) of the all-reduces, so that recomputation can run under
them. Numbers are the host's own in both.
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

from ext.adapters.megatron.layers import forwards_replaced
from ext.comm.tensor_parallel.hooks import current_listener
from ext.runtime.split_backward import WeightGradQueue, active_queue

_FUSED_ELSEWHERE = ("transformer_engine.", "megatron.core.extensions.")


def make_deferrable(model: nn.Module) -> None:
    """Let every parallel linear layer of the model defer where a `WeightGradQueue` intercepts it. Idempotent."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and "_forward_impl" not in vars(module):
            module._forward_impl = partial(_forward, module._forward_impl)


def announced(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``linear(x)``, whose all-reduce in forward (row-parallel) or backward (column-parallel) a listener is told of.

    Nobody is told where there is none: one rank, sequence parallelism, which scatters and gathers instead; and where
    the weight's gradient is not autograd's: a split backward, fused accumulation.
    """
    if not _is_announced(linear):
        return linear(x)
    with forwards_replaced([linear], [partial(_announced_forward, linear)]):  # so that its hooks run, too
        return linear(x)


def _is_announced(layer: Any) -> bool:
    listens = current_listener() is not None and active_queue() is None and torch.is_grad_enabled()
    if not listens or layer.sequence_parallel or layer.gradient_accumulation_fusion or layer.explicit_expert_comm:
        return False
    is_column = isinstance(layer, ColumnParallelLinear)
    reduces = layer.allreduce_dgrad and not layer.gather_output if is_column else layer.input_is_parallel
    return bool(reduces) and dist.get_world_size(layer.tp_group) > 1  # pyright: ignore[reportArgumentType]


def _announced_forward(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    in_forward = isinstance(layer, RowParallelLinear)
    bias = None if layer.skip_bias_add or in_forward else layer.bias
    output: Any = _AnnouncedLinear.apply(layer.tp_group, in_forward, x, layer.weight, bias)
    if in_forward and not layer.skip_bias_add and layer.bias is not None:
        output = output + layer.bias
    return output, layer.bias if layer.skip_bias_add else None


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
    call = _Call(queue, weight, allreduce_dgrad, tp_group if sequence_parallel else None, tp_group)
    return _ParallelLinear.apply(call, queue.anchor(), input, bias)  # type: ignore[return-value]


class _AnnouncedLinear(torch.autograd.Function):
    """``x W^T + b``; either its output or the gradient of its input is summed over the group."""

    @staticmethod
    def forward(ctx: Any, group: Any, in_forward: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The weight stays out of saved_tensors: reading these brings back an input that was dropped, and that shall
        # not happen before the collective is launched.
        ctx.save_for_backward(x)
        ctx.weight, ctx.version, ctx.group, ctx.in_forward = weight, weight._version, group, in_forward
        ctx.listener = listener = current_listener()
        output = torch.matmul(x, weight.t())
        if bias is not None:
            output = output + bias
        if in_forward:
            work: Any = dist.all_reduce(output, group=group, async_op=True)
            if listener is not None:
                listener.forward_launched(work)
            work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        assert ctx.weight._version == ctx.version, "a weight was changed between forward and backward"
        x_grad = grad.matmul(ctx.weight)
        work: Any = None
        if not ctx.in_forward:
            work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        rows, inputs = prepare_input_tensors_for_wgrad_compute(grad, ctx.saved_tensors[0])
        weight_grad = rows.t().matmul(inputs) if ctx.needs_input_grad[3] else None
        bias_grad = rows.sum(dim=0) if ctx.needs_input_grad[4] else None
        if work is not None:
            if ctx.listener is not None:
                ctx.listener.backward_launched(work)
            work.wait()
        return None, None, x_grad, weight_grad, bias_grad


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
            call.queue.defer(partial(call.add_weight_grad, grad.detach(), x.detach()), grad)
        return None, None, x_grad, bias_grad
