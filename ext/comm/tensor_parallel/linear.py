"""Linear layers that several ranks share, after Megatron-LM (arXiv:1909.08053, section 3).

A column-parallel layer takes the whole input and gives a part of the output; the gradients of its input are partial
sums. A row-parallel layer takes a part of the input, and its outputs are partial sums. One all-reduce each makes them
whole. It is launched as soon as its numbers are there; then come what can run without them, the listener's work, and
last the wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.hooks import current_listener


class ColumnParallelLinear(nn.Module):
    """``(..., in)`` to this rank's columns of the output, ``(..., out / ranks)``.

    Backward, collective over the group: all-reduce of the input's gradient under the weight's gradient.

    Args:
        linear: the whole layer, the same on every rank; only this rank's part of it is kept.
        group: ranks that share it.
        blocks: equal blocks of output columns that are shared one by one; 3 for queries, keys and values in one.

    Raises:
        ConfigError: the columns cannot be shared evenly.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, group: TensorParallelGroup, *, blocks: int = 1) -> None:
        super().__init__()
        self.group = group
        self.weight = _split(nn.Parameter(group.shard(linear.weight, 0, blocks)))
        bias = None if linear.bias is None else _split(nn.Parameter(group.shard(linear.bias, 0, blocks)))
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel_linear(x, self.weight, self.bias, self.group)

    def local(self, x: Tensor) -> Tensor:
        """The same, where the caller sums the gradient of ``x`` over the group."""
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's part of the input, ``(..., in / ranks)``, to the whole output ``(..., out)``.

    Forward, collective over the group: all-reduce of the output. The bias is whole on every rank and added behind it.

    Args:
        linear: the whole layer, the same on every rank; only this rank's part of its weight is kept.
        group: ranks that share it.

    Raises:
        ConfigError: the rows cannot be shared evenly.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, group: TensorParallelGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _split(nn.Parameter(group.shard(linear.weight, 1)))
        self.register_parameter("bias", None if linear.bias is None else nn.Parameter(linear.bias.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.with_bias(row_parallel_linear(x, self.weight, self.group))

    def local(self, x: Tensor) -> Tensor:
        """This rank's share of the output, where the caller sums it over the group and adds the bias behind that."""
        return functional.linear(x, self.weight)

    def with_bias(self, output: Tensor) -> Tensor:
        """The summed output and the bias."""
        return output if self.bias is None else output + self.bias


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorParallelGroup) -> Tensor:
    """``x`` times this rank's columns; the gradient of ``x`` is summed over the group in backward."""
    x, weight, bias = _as_autocast(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, group)  # type: ignore[no-any-return]


def row_parallel_linear(x: Tensor, weight: Tensor, group: TensorParallelGroup) -> Tensor:
    """This rank's part of ``x`` times its rows, summed over the group."""
    x, weight, _ = _as_autocast(x, weight, None)
    return _RowLinear.apply(x, weight, group)  # type: ignore[no-any-return]


def sum_output(output: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sums ``output`` over the group in place, in a forward that autograd does not see; its listener is told."""
    work, listener = group.start_all_reduce(output), current_listener()
    if work is not None:
        if listener is not None:
            listener.forward_launched(work)
        work.wait()
    return output


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorParallelGroup) -> Tensor:
        # The weight stays out of saved_tensors: reading these brings back an input that was dropped, and that shall
        # not happen before the collective is launched.
        ctx.save_for_backward(x)
        ctx.weight, ctx.version, ctx.has_bias = weight, weight._version, bias is not None
        ctx.group, ctx.listener = group, current_listener()
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_unchanged(ctx)
        x_grad = work = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grad.matmul(ctx.weight)
            work = ctx.group.start_all_reduce(x_grad)
        if ctx.needs_input_grad[1]:
            weight_grad = _weight_grad(grad, ctx.saved_tensors[0])
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad = grad.flatten(0, -2).sum(0)
        if work is not None:
            if ctx.listener is not None:
                ctx.listener.backward_launched(work)
            work.wait()
        return x_grad, weight_grad, bias_grad, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.version = weight, weight._version
        return sum_output(functional.linear(x, weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_unchanged(ctx)
        x_grad = grad.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        weight_grad = _weight_grad(grad, ctx.saved_tensors[0]) if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, None


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t().matmul(x.flatten(0, -2))


def _check_unchanged(ctx: Any) -> None:
    if ctx.weight._version != ctx.version:
        raise RuntimeError(
            f"a tensor-parallel weight was changed in place between forward and backward: it is at version "
            f"{ctx.weight._version}, expected {ctx.version}. Step the optimizer after the backward."
        )


def _split(parameter: nn.Parameter) -> nn.Parameter:
    """Marks it as one part of several, as Megatron and DeepSpeed look for it when they take norms over ranks."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def _as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as autocast would cast them, outside of a Function, whose backward runs without it."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
