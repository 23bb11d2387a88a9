"""All-to-all in one hop (linear) or in two (inside and between nodes), even and uneven, with gradients.

Two hops send fewer, larger messages: m-1 inside a node and N-1 between nodes in place of N*m-1, for the same
bytes between nodes (Tutel, arXiv:2206.03382, section 4.3). Both only move rows: their results are equal bit
for bit. Every rank of the group must call, in the same order; the backward of a call is collective again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ext.comm.topology import NodeGroups

Mover = Callable[[Tensor], Tensor]


class HopOrder(str, Enum):
    """Which hop comes first: inside the node (Tutel's order) or between equal local ranks (the rail)."""

    NODE_FIRST = "node_first"
    RAIL_FIRST = "rail_first"


@dataclass(frozen=True)
class Plan:
    """The routes of one uneven exchange, for both directions. It belongs to one call and holds no rows.

    Attributes:
        counts: (ranks, kinds) int64, the rows that each rank sends here, per kind.
        num_per_kind: their sums over the ranks, on the host.
        sent: rows that this rank sends, by the first hop's destination.
        num_received: rows this rank receives.
        there, back: the exchange of plain rows, without gradients.
    """

    counts: Tensor
    num_per_kind: list[int]
    sent: list[int]
    num_received: int
    there: Mover
    back: Mover

    @property
    def num_sent(self) -> int:
        return sum(self.sent)

    def send(self, rows: Tensor) -> Tensor:
        """(num_sent, ...) rows by destination rank -> (num_received, ...) by source rank. Collective."""
        _check_rows(rows, self.num_sent)
        return move(rows, self.there, self.back)

    def send_back(self, rows: Tensor) -> Tensor:
        """The way of `send` in reverse: (num_received, ...) -> (num_sent, ...). Collective."""
        _check_rows(rows, self.num_received)
        return move(rows, self.back, self.there)

    def send_both(self, rows: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """`send` of two tensors whose gradients come back in this order on every rank. Collective."""
        _check_rows(rows, self.num_sent)
        _check_rows(beside, self.num_sent)
        return _MoveBoth.apply(rows, beside, self.there, self.back)


class Exchange(ABC):
    """An all-to-all algorithm over one process group."""

    def even(self, slices: Tensor) -> Tensor:
        """(ranks, ...) one slice per destination -> (ranks, ...) one slice per source. Collective."""
        return move(slices, self._even, self._even)

    @abstractmethod
    def plan(self, counts: Tensor) -> Plan:
        """Tell every rank what it will receive. Collective; one copy to the host.

        Args:
            counts: (ranks, kinds) int64, the rows this rank sends to each rank, per kind (expert).
        """

    @abstractmethod
    def _even(self, slices: Tensor) -> Tensor: ...


class LocalExchange(Exchange):
    """The exchange of a rank with itself: nothing moves.

    Over several ranks it pretends that each of them sends what this one does: for measuring the work of one.
    """

    def plan(self, counts: Tensor) -> Plan:
        sent, kinds = _to_host(counts.sum(1), counts.sum(0))
        return Plan(counts, kinds, sent, sum(sent), _stay, _stay)

    def _even(self, slices: Tensor) -> Tensor:
        return slices.contiguous()


class LinearExchange(Exchange):
    """One hop: a message to every other rank of ``group``."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def plan(self, counts: Tensor) -> Plan:
        received = _all_to_all(counts, self.group)
        inputs, outputs, kinds = _to_host(counts.sum(1), received.sum(1), received.sum(0))
        hop = _Hop(self.group, inputs, outputs)
        return Plan(received, kinds, inputs, sum(outputs), hop.forward, hop.backward)

    def _even(self, slices: Tensor) -> Tensor:
        return _all_to_all(slices, self.group)


class TwoLevelExchange(Exchange):
    """Two hops, inside nodes and between equal local ranks, in either order."""

    def __init__(self, groups: NodeGroups, order: HopOrder = HopOrder.RAIL_FIRST) -> None:
        self.groups = groups
        self.order = HopOrder(order)
        self.num_nodes = groups.topology.num_nodes
        self.ranks_per_node = groups.topology.ranks_per_node
        self._node_first = self.order is HopOrder.NODE_FIRST
        hops = (groups.intra_node, groups.inter_node)
        self._first, self._second = hops if self._node_first else hops[::-1]

    def _even(self, slices: Tensor) -> Tensor:
        by_node = slices.reshape(self.num_nodes, self.ranks_per_node, *slices.shape[1:])
        # The first hop goes to the rank that shares one coordinate with the destination.
        middle = _all_to_all(by_node.transpose(0, 1) if self._node_first else by_node, self._first)
        final = _all_to_all(middle.transpose(0, 1), self._second)
        return (final if self._node_first else final.transpose(0, 1)).reshape(slices.shape)

    def plan(self, counts: Tensor) -> Plan:
        # The counts travel as the rows will, so that the rank in the middle learns its share too.
        kinds = counts.shape[1]
        by_node = counts.reshape(self.num_nodes, self.ranks_per_node, kinds)
        first = by_node.transpose(0, 1) if self._node_first else by_node
        middle = _all_to_all(first, self._first)
        second = middle.transpose(0, 1)
        final = _all_to_all(second, self._second)
        received = (final if self._node_first else final.transpose(0, 1)).reshape(counts.shape)
        s1_in, s1_out, s2_in, s2_out, per_kind = _to_host(
            *(part.sum((1, 2)) for part in (first, middle, second, final)), received.sum(0)
        )
        before = segment_transpose(counts.reshape(*by_node.shape[:2], kinds).sum(2), sum(s1_in))
        between = segment_transpose(middle.sum(2), sum(s1_out))
        after = segment_transpose(final.sum(2), sum(s2_out))
        route = _TwoHops(
            _Hop(self._first, s1_in, s1_out),
            _Hop(self._second, s2_in, s2_out),
            # Rows come by destination rank, that is [node][local], and leave by source rank.
            before if self._node_first else None,
            between,
            None if self._node_first else after,
        )
        return Plan(received, per_kind, s1_in, sum(s2_out), route.forward, route.backward)


@dataclass(frozen=True)
class _Hop:
    group: ProcessGroup
    input_splits: list[int]
    output_splits: list[int]

    def forward(self, rows: Tensor) -> Tensor:
        return _all_to_all_rows(rows, self.group, self.input_splits, self.output_splits)

    def backward(self, rows: Tensor) -> Tensor:
        return _all_to_all_rows(rows, self.group, self.output_splits, self.input_splits)


@dataclass(frozen=True)
class _TwoHops:
    """``before``, ``between`` and ``after`` are the orders of rows around the hops; None keeps them."""

    first: _Hop
    second: _Hop
    before: Tensor | None
    between: Tensor
    after: Tensor | None

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first.forward(_take(rows, self.before))
        rows = self.second.forward(_take(rows, self.between))
        return _take(rows, self.after)

    def backward(self, rows: Tensor) -> Tensor:
        rows = self.second.backward(_put(rows, self.after))
        rows = self.first.backward(_put(rows, self.between))
        return _put(rows, self.before)


def move(rows: Tensor, there: Mover, back: Mover) -> Tensor:
    """``there(rows)``, with ``back`` as its gradient: two collectives that are each other's reverse."""
    return _Move.apply(rows, there, back)


def segment_transpose(lengths: Tensor, total: int) -> Tensor:
    """The order that turns rows stored as segments [A][B] into [B][A].

    Args:
        lengths: (A, B) int64 rows per segment.
        total: their sum, known on the host.

    Returns:
        (total,) int64 positions to take the rows from.
    """
    num_outer, num_inner = lengths.shape
    flat = lengths.reshape(-1)
    starts = flat.cumsum(0) - flat
    order = torch.arange(flat.numel(), device=flat.device).view(num_outer, num_inner).t().reshape(-1)
    moved = flat[order]
    shift = starts[order] - (moved.cumsum(0) - moved)
    return torch.arange(total, device=flat.device) + torch.repeat_interleave(shift, moved, output_size=total)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Mover, back: Mover) -> Tensor:  # type: ignore[override]
        ctx.there, ctx.back = there, back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return move(grad, ctx.back, ctx.there), None, None


class _MoveBoth(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, beside: Tensor, there: Mover, back: Mover
    ) -> tuple[Tensor, Tensor]:
        ctx.back = back
        return there(rows), there(beside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # What needs a gradient is the same on every rank, so every rank makes the same calls.
        moved = [ctx.back(grad) if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        return (*moved, None, None)


def _stay(rows: Tensor) -> Tensor:
    return rows.view_as(rows)


def _all_to_all(slices: Tensor, group: ProcessGroup) -> Tensor:
    slices = slices.contiguous()
    output = torch.empty_like(slices)
    dist.all_to_all_single(output, slices, group=group)
    return output


def _all_to_all_rows(rows: Tensor, group: ProcessGroup, inputs: list[int], outputs: list[int]) -> Tensor:
    output = rows.new_empty((sum(outputs), *rows.shape[1:]))
    dist.all_to_all_single(output, rows.contiguous(), outputs, inputs, group=group)
    return output


def _to_host(*vectors: Tensor) -> list[list[int]]:
    """The vectors as lists, by one copy."""
    numbers = iter(torch.cat(vectors).tolist())
    return [[next(numbers) for _ in range(len(vector))] for vector in vectors]


def _check_rows(rows: Tensor, expected: int) -> None:
    if rows.shape[0] != expected:
        raise ValueError(f"{rows.shape[0]} rows given, the plan has {expected}")


def _take(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows.index_select(0, order)


def _put(rows: Tensor, order: Tensor | None) -> Tensor:
    """The reverse of `_take`; ``order`` is a permutation."""
    if order is None:
        return rows
    output = torch.empty_like(rows)
    output[order] = rows
    return output
