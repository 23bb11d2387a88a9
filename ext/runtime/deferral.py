"""What a layer holds where its backward is split: one run, with tensors that nobody but autograd holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ext.cost.profile import Deferral
from ext.runtime.live_bytes import LiveBytes
from ext.runtime.split_backward import WeightGradQueue


def measure_deferral(
    layer: Callable[[Any], Any],
    inputs: Any,
    needs_grad: Sequence[bool],
    trained: Sequence[Tensor],
    constant: Iterable[Tensor],
    positions: tuple[Sequence[int], Sequence[int]],
) -> Deferral:
    """Run a layer's forward and I and see what is left for W. No gradient reaches a parameter.

    Args:
        layer: called with one tensor, or one tuple of tensors.
        inputs: for it.
        needs_grad: says of each input tensor whether its gradient is computed.
        trained: parameters.
        constant: tensors that do not belong to the micro-batch.
        positions: of input and output tensors, in the layer's storages.
    """
    counter = LiveBytes(constant)
    queue = _ProbedQueue(counter)
    with torch.enable_grad():
        given = _copies(inputs, needs_grad, queue.only_anchor)
        ends = [weakref.ref(tensor.untyped_storage()) for tensor in tensors_of(given)]
        with counter.saved():
            outputs = queue.intercepting(layer)(given)
        del given
        ends += [weakref.ref(tensor.untyped_storage()) for tensor in tensors_of(outputs)]
        roots = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
        del outputs
        if not roots:
            return Deferral((), 0)
        end = _End.apply(*roots)
        del roots
    saved = counter.peak = counter.now
    with queue.deferring(0, 0):
        torch.autograd.grad(end, [queue.only_anchor, *trained], allow_unused=True)
    sizes, waiting = counter.storages, dict[int, int]()
    for position, ref in zip((*positions[0], *positions[1]), ends, strict=True):
        storage = ref()
        if storage is not None and storage._cdata in sizes:
            waiting[position] = sizes[storage._cdata]
    return Deferral(tuple(waiting), counter.now - sum(waiting.values()), counter.peak - saved)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors that a layer takes or gives."""
    return [value for value in (values if isinstance(values, tuple | list) else (values,)) if isinstance(value, Tensor)]


class _ProbedQueue(WeightGradQueue):
    """Takes one backward of one layer, which asks for the gradient of the only anchor instead of parameters'."""

    def __init__(self, counter: LiveBytes) -> None:
        super().__init__(limit=1, note=counter.note)
        self.only_anchor = super().anchor()

    def anchor(self) -> Tensor:
        return self.only_anchor.view_as(self.only_anchor)  # autograd tells of no leaf whether a backward goes there


def _copies(values: Any, needs_grad: Sequence[bool], anchor: Tensor) -> Any:
    flags = iter(needs_grad)

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _Begin.apply(anchor, value) if next(flags) else value.detach().clone()

    return type(values)(map(copy, values)) if isinstance(values, tuple | list) else copy(values)


class _Begin(torch.autograd.Function):
    """A copy that needs a gradient and is no leaf: freed when the graph lets go of it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _End(torch.autograd.Function):
    """Starts the backward of several outputs without keeping them."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.likes = [torch.empty_like(output, device="meta") for output in outputs]
        ctx.device = outputs[0].device
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones_like(like, device=ctx.device) for like in ctx.likes)
