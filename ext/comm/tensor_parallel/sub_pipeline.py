"""Sub-pipelined tensor parallelism: a micro-batch in parts, so that one part's all-reduce runs under another's compute.

A stack of layers is a list of segments, each ``x + something that ends in an all-reduce``. Part by part a segment
computes and launches its all-reduce; before the next segment touches the part, that is waited for. So the all-reduce
of one part runs under the compute of the other, within a block and from block to block. The backward goes the same way
from the last segment to the first, with the all-reduces of the input gradients.

Autograd itself would run the backward of the parts one after the other and wait in between. So the stack is one node of
the graph, which keeps a graph for every piece between two collectives and runs them in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Work

from ext.comm.tensor_parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class Segment:
    """``x -> merge(x, sum over the group of body(enter(x)))``, every piece a function without collectives.

    Attributes:
        enter: from the residual stream to the input of column-parallel layers, whose gradient is a partial sum.
        body: from there to this rank's share of the output; ends in the ``local`` of a row-parallel layer.
        merge: residual stream and whole output to the residual stream: bias, dropout, sum.
    """

    enter: Callable[[Tensor], Tensor]
    body: Callable[[Tensor], Tensor]
    merge: Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class HasSegments(Protocol):
    """A layer that can be sub-pipelined.

    Attributes:
        group: ranks that share it.
    """

    group: TensorParallelGroup

    def segments(self) -> Sequence[Segment]: ...

    def parameters(self) -> Any: ...


def sub_pipelined(layers: Sequence[Any], num_parts: int = 2) -> list[Any]:
    """The layers of a stage with every run of neighbours that have segments as one call in the place of its first.

    What stands in the places of the others gives its input back. A run of layers whose groups differ is cut there.
    """
    standing: list[Any] = []
    runs: list[list[HasSegments]] = []
    for layer in layers:
        if not isinstance(layer, HasSegments):
            standing.append(layer)
            runs.append([])
        elif runs and runs[-1] and runs[-1][0].group == layer.group:
            runs[-1].append(layer)
            standing.append(_passed)
        else:
            runs.append([layer])
            standing.append(partial(_run, runs[-1], num_parts))
    return standing


def _run(layers: Sequence[HasSegments], num_parts: int, x: Tensor) -> Tensor:
    return run_sub_pipelined(layers, x, num_parts)


def _passed(x: Any) -> Any:
    return x


def run_sub_pipelined(layers: Sequence[HasSegments], x: Tensor, num_parts: int = 2) -> Tensor:
    """All layers, one after another. Collective over their group, forward and backward.

    Costs one tensor of the size of ``x`` per segment more than the plain layers, from forward to backward. It runs the
    layers' segments, not the layers: hooks of their forward are not called.

    Args:
        layers: neighbours of one stage, shared by the same ranks.
        x: ``(batch, ...)``; a batch that the number does not divide gives parts that differ by one, and one that is
            smaller gives fewer parts.
        num_parts: of the micro-batch.
    """
    group = layers[0].group
    segments = [segment for layer in layers for segment in layer.segments()]
    num_parts = max(1, min(num_parts, x.shape[0]))
    trains = any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    if not torch.is_grad_enabled() or not (trains or x.requires_grad):
        return torch.cat(_Forward(segments, group, keep=False).run(x.tensor_split(num_parts)))
    # Without it nothing would be trained behind an input that needs no gradient.
    anchor = x.new_empty(0, requires_grad=True)
    return _Stack.apply(x, anchor, segments, group, num_parts)  # type: ignore[no-any-return]


class _Piece:
    """A graph between two collectives, from leaves to outputs."""

    def __init__(self, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        self._leaves = leaves
        # Edges, since the outputs themselves need not live until the backward.
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]

    def backward(self, *gradients: Tensor | None) -> list[Tensor | None]:
        """Accumulates in the parameters; gives the gradients of the leaves."""
        pairs = [(e, g) for e, g in zip(self._edges, gradients, strict=True) if e is not None and g is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        found = [leaf.grad for leaf in self._leaves]
        self._leaves = ()
        return found


class _Part:
    """One part of the micro-batch on its way through the segments."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.reduced: Tensor | None = None
        self.work: Work | None = None
        self.entries: list[_Piece] = []
        """Residual stream and sum to the residual stream and what enters the next segment; the last has no next."""
        self.bodies: list[_Piece] = []

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class _Forward:
    """The forward of all parts; ``keep`` says whether their graphs are kept in them."""

    def __init__(self, segments: Sequence[Segment], group: TensorParallelGroup, *, keep: bool) -> None:
        self._segments, self._group, self._keep = segments, group, keep

    def run(self, parts: Sequence[Tensor]) -> list[Tensor]:
        self.parts = [_Part(part) for part in parts]
        for number in range(len(self._segments)):
            for part in self.parts:
                self._segment(part, number)
        return [self._finish(part) for part in self.parts]

    def _segment(self, part: _Part, number: int) -> None:
        inputs, x = self._merged(part, number)
        entered = self._segments[number].enter(x)
        if self._keep:
            part.entries.append(_Piece(inputs, (x, entered)))
        part.x = x.detach()
        (leaf,) = self._leaves((entered,), entered.requires_grad)
        share = self._segments[number].body(leaf)
        if self._keep:
            part.bodies.append(_Piece((leaf,), (share,)))
        part.reduced = share.detach()
        part.work = self._group.start_all_reduce(part.reduced)

    def _finish(self, part: _Part) -> Tensor:
        inputs, y = self._merged(part, len(self._segments))
        if self._keep:
            part.entries.append(_Piece(inputs, (y,)))
        return y.detach()

    def _merged(self, part: _Part, number: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The residual stream before segment ``number``, and the leaves that it was made of."""
        part.wait()
        if part.reduced is None:
            (leaf,) = self._leaves((part.x,), part.x.requires_grad)
            return (leaf,), leaf
        inputs = self._leaves((part.x, part.reduced), True)
        part.reduced = None
        return inputs, self._segments[number - 1].merge(*inputs)

    def _leaves(self, tensors: tuple[Tensor, ...], requires_grad: bool) -> tuple[Tensor, ...]:
        if not self._keep:
            return tensors
        return tuple(tensor.detach().requires_grad_(requires_grad) for tensor in tensors)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, segments: Sequence[Segment], group: TensorParallelGroup, num_parts: int
    ) -> Tensor:
        ctx.group = group
        forward = _Forward(segments, group, keep=True)
        with torch.enable_grad():
            outputs = forward.run(x.detach().requires_grad_(ctx.needs_input_grad[0]).tensor_split(num_parts))
        ctx.parts = forward.parts
        return torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts, ctx.parts = ctx.parts, None
        if parts is None:
            raise RuntimeError("a sub-pipelined stack runs backward once; run its forward again for a second one.")
        gradients = _backward(parts, ctx.group, gradient.tensor_split(len(parts)))
        return None if gradients is None else torch.cat(gradients), None, None, None, None


def _backward(parts: Sequence[_Part], group: TensorParallelGroup, gradients: Sequence[Tensor]) -> list[Tensor] | None:
    """From the gradients of the parts' outputs to those of their inputs; None where no one asked for them."""
    streams: list[Tensor | None] = list(gradients)
    entered: list[Tensor | None] = [None] * len(parts)
    for number in reversed(range(len(parts[0].bodies) + 1)):
        for index, part in enumerate(parts):
            part.wait()
            outputs = [streams[index]] if number == len(part.bodies) else [streams[index], entered[index]]
            found = part.entries[number].backward(*outputs)
            streams[index] = found[0]
            if number:
                (summand,) = part.bodies[number - 1].backward(found[1])
                part.work = None if summand is None else group.start_all_reduce(summand)
                entered[index] = summand
    return None if any(stream is None for stream in streams) else streams  # type: ignore[return-value]
