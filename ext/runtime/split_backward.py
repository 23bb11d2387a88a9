"""Backward in two parts: I gives the gradient of the inputs, W later those of the weights.

While a layer's forward runs under `WeightGradQueue.intercepting`, every linear layer, matrix product and convolution
whose weight is a parameter becomes an autograd Function of ours. Inside `WeightGradQueue.deferring` its backward
queues the weight's gradient instead of computing it; `WeightGradQueue.release` computes it and hands it to autograd at
the parameter, so that its hooks and the accumulation run as in any backward, in W and not in I. A backward outside
`deferring` does so at once. What stays in I, right but not deferred: gradients of norms, embeddings and biases, of
weights that the forward computes (a parametrization, say), and all inside a compiled layer.

Each gradient is computed by torch's own formula. Sums over micro-batches keep their order where W keeps that of I, so
gradients are bit-equal to those of a fused backward, with one exception: a weight used several times in one
micro-batch has its contributions summed in another order, and its hooks see them one by one.

Cost: from I to W the inputs of these operations and the gradients of their outputs stay alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_Key = tuple[int, int]


class WeightGradQueue:
    """Deferred weight gradients of one rank, by (stage, micro-batch).

    Args:
        limit: most micro-batches whose W may be outstanding at once; the plan in use knows it.
        note: called with every gradient that waits for W, for those who count memory.
    """

    def __init__(self, limit: int, note: Callable[[Tensor], object] = lambda tensor: None) -> None:
        self.limit = limit
        self._note = note
        self._jobs: dict[_Key, list[Callable[[], None]]] = {}
        self._collecting: list[Callable[[], None]] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def intercepting(self, layer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``layer`` with weight gradients that can be deferred, also where a recompute calls it again."""

        def call(inputs: Any) -> Any:
            with self.interception():
                return layer(inputs)

        return call

    def interception(self) -> AbstractContextManager[Any]:
        """Around a part of a forward, or of its recompute, whose weight gradients can be deferred."""
        return _Interceptor(self)

    @contextmanager
    def deferring(self, stage: int, microbatch: int) -> Iterator[None]:
        """A backward inside leaves its weight gradients to `release`; one context per stage and micro-batch."""
        key = (stage, microbatch)
        assert key not in self._jobs, f"{key} is queued already"
        assert len(self._jobs) < self.limit, f"{len(self._jobs)} micro-batches wait for W, at most {self.limit} may"
        self._jobs[key] = self._collecting = []
        try:
            yield
        finally:
            self._collecting = None

    def release(self, stage: int, microbatch: int, after_each: Callable[[], object] = lambda: None) -> None:
        """Compute and accumulate what `deferring` left, one weight after another."""
        jobs = self._jobs.pop((stage, microbatch))
        for index, job in enumerate(jobs):
            jobs[index] = _nothing  # what the job holds goes as soon as it has run
            job()
            after_each()

    def anchor(self) -> Tensor:
        """An input of an operation's node, which makes its output need a gradient where only the weight does."""
        return torch.empty(0, requires_grad=True)

    def defer(self, job: Callable[[], None], grad: Tensor | None = None) -> None:
        """For the backward of an autograd Function: ``job`` runs in W, or now where nothing is deferred.

        ``grad`` is what the job holds beside tensors that the forward has saved.
        """
        if self._collecting is None:
            job()
            return
        self._collecting.append(job)
        if grad is not None:
            self._note(grad)

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._jobs.clear()
        self._collecting = None


def active_queue() -> WeightGradQueue | None:
    """The queue under whose `WeightGradQueue.intercepting` the running forward is; for Functions that defer."""
    return _active.get()


_active: ContextVar[WeightGradQueue | None] = ContextVar("active_queue", default=None)


def _nothing() -> None:
    """In the place of a job that has run."""


class _Interceptor(TorchFunctionMode):
    """Replaces operations on parameters by `_Deferrable`."""

    def __init__(self, queue: WeightGradQueue) -> None:
        super().__init__()
        self._queue = queue
        self._token: Any = None

    def __enter__(self) -> _Interceptor:
        self._token = _active.set(self._queue)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = _READERS.get(func)
        if read is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            call = read(*args, **(kwargs or {}))
            if call is not None and _is_deferrable(call.x, call.weight):
                return _apply(self._queue, call)
        return func(*args, **(kwargs or {}))


class _Operation(Protocol):
    """A product of an input and a weight with its derivatives; ``grad`` is that of the output."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def bias_grad(self, grad: Tensor) -> Tensor: ...


class _Call(NamedTuple):
    operation: _Operation
    x: Tensor
    weight: Tensor
    bias: Tensor | None


class _Deferrable(torch.autograd.Function):
    """An operation whose weight gradient can wait.

    The weight is no input of the node: otherwise I would call the hooks of a parameter that gets no gradient yet. An
    anchor is, which makes the output need a gradient where only the weight does.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, queue: WeightGradQueue, anchor: Tensor, x: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.queue, ctx.operation, ctx.weight = queue, call.operation, call.weight
        ctx.save_for_backward(x)
        return call.operation.forward(x, call.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        operation, weight = ctx.operation, ctx.weight
        *_, needs_x, needs_bias = ctx.needs_input_grad
        x_grad = operation.input_grad(grad, x, weight.to(x.dtype)) if needs_x else None
        bias_grad = operation.bias_grad(grad) if needs_bias else None
        # A gradient that the forward takes for itself, by torch.autograd.grad, asks for no parameter's.
        anchor = ctx.next_functions[0][0]
        if torch._C._will_engine_execute_node(anchor):
            ctx.queue.defer(_weight_job(operation, grad.detach(), x.detach(), weight), grad)
        return None, None, None, x_grad, bias_grad


def _weight_job(operation: _Operation, grad: Tensor, x: Tensor, weight: Tensor) -> Callable[[], None]:
    def job() -> None:
        with torch.no_grad():
            weight_grad = operation.weight_grad(grad, x, weight).to(weight.dtype)
        torch.autograd.backward(weight, weight_grad)

    return job


def _is_deferrable(x: Any, weight: Any) -> bool:
    """Plain tensors, and a weight that is a parameter or a view of one: no saved tensor lies on the way to it."""
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or not weight.requires_grad:
        return False
    if not (weight.is_leaf or (weight._is_view() and weight._base.is_leaf)):  # type: ignore[union-attr]
        return False
    return x.layout == weight.layout == torch.strided and not torch._C._are_functorch_transforms_active()


_PLAIN = (Tensor, nn.Parameter)


def _apply(queue: WeightGradQueue, call: _Call) -> Tensor:
    """The operation in the type that autocast gives it, where autocast is on."""
    operation, x, weight, bias = call
    device = x.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    elif x.dtype != weight.dtype:
        return operation.forward(x, weight, bias)  # raises as it would without us
    return _Deferrable.apply(call, queue, queue.anchor(), x, bias)  # type: ignore[return-value]


def _rows(tensor: Tensor) -> Tensor:
    """``(..., features)`` as ``(rows, features)``."""
    return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class _Linear:
    """``x W^T + b`` with x ``(..., in)``, W ``(out, in)``, b ``(out)``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.matmul(weight)

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(grad).t().mm(_rows(x))

    def bias_grad(self, grad: Tensor) -> Tensor:
        return _rows(grad).sum(0)


@dataclass(frozen=True)
class _Product(_Linear):
    """``x W + b`` with x ``(..., in)``, W ``(in, out)``, b ``(out)``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.matmul(weight.t())

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(x).t().mm(_rows(grad))


@dataclass(frozen=True)
class _Convolution:
    """A convolution over the last ``num_dims`` dimensions of ``(batch, channels, ...)``."""

    num_dims: int
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    transposed: bool = False
    output_padding: Any = 0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, *self._options)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, [True, False, False])[0]

    def weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight.to(x.dtype), [False, True, False])[1]

    def bias_grad(self, grad: Tensor) -> Tensor:
        return grad.transpose(0, 1).flatten(1).sum(1)

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Sequence[Tensor]:
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *self._options, wanted)

    @property
    def _options(self) -> tuple[Any, ...]:
        stride, padding, dilation, output_padding = (
            [value] * self.num_dims if isinstance(value, int) else list(value)
            for value in (self.stride, self.padding, self.dilation, self.output_padding)
        )
        return stride, padding, dilation, self.transposed, output_padding, self.groups


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call | None:
    return _Call(_Linear(), input, weight, bias) if weight.dim() == 2 else None


def _matmul(input: Tensor, other: Any = None, **others: Any) -> _Call | None:
    other = others.pop("mat2", other)
    if others or not isinstance(other, Tensor) or other.dim() != 2 or input.dim() < 2:
        return None
    return _Call(_Product(), input, other, None)


def _addmm(input: Tensor, mat1: Any, mat2: Any = None, **others: Any) -> _Call | None:
    if any(value != 1 for value in others.values()) or not isinstance(mat2, Tensor) or mat2.dim() != 2:
        return None
    return _Call(_Product(), mat1, mat2, input) if tuple(input.shape) == (mat2.shape[1],) else None


def _convolution(num_dims: int, transposed: bool) -> Callable[..., _Call | None]:
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Call | None:
        if isinstance(padding, str) or input.dim() != num_dims + 2:
            return None
        return _Call(_Convolution(num_dims, stride, padding, dilation, groups), input, weight, bias)

    def forward_transposed(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> _Call | None:
        if input.dim() != num_dims + 2:
            return None
        operation = _Convolution(num_dims, stride, padding, dilation, groups, True, output_padding)
        return _Call(operation, input, weight, bias)

    return forward_transposed if transposed else forward


_READERS: dict[Any, Callable[..., _Call | None]] = {
    functional.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **{
        function: _convolution(num_dims, transposed)
        for transposed, functions in (
            (False, (torch.conv1d, torch.conv2d, torch.conv3d)),
            (True, (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)),
        )
        for num_dims, function in enumerate(functions, 1)
    },
}
