"""Moving token rows to slots of a buffer and weighted sums of slots back to tokens, each the other's gradient.

A route is one (token, choice) pair. ``slots`` (tokens, k) names the slot of every route, -1 for a route that is
dropped; ``sources`` (slots,) names the route, as ``token * k + choice``, that fills a slot, -1 for an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where every route of a call lies in a buffer.

    Attributes:
        slots: (tokens, k) int64 slot of each route, -1 where dropped.
        sources: (num_slots,) int64 route of each slot, -1 where empty.
        is_full: no route is dropped and no slot is empty, so that nothing needs masking.
    """

    slots: Tensor
    sources: Tensor
    is_full: bool


def sorted_routes(kinds: Tensor, num_kinds: int) -> tuple[Tensor, Tensor]:
    """Routes by kind, within a kind in the order of tokens.

    Args:
        kinds: (tokens, k) int64 in [0, num_kinds), -1 for routes that are dropped.
        num_kinds: experts, or nodes.

    Returns:
        All routes in order (tokens * k,), the dropped ones first; and the count of each kind (num_kinds,).
    """
    flat = kinds.reshape(-1)
    counts = torch.zeros(num_kinds + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat + 1, torch.ones_like(flat))
    return flat.argsort(stable=True), counts[1:]


def sorted_layout(order: Tensor, num_rows: int, shape: torch.Size) -> Layout:
    """The layout of ``num_rows`` rows in the order of `sorted_routes`, without room for the dropped ones."""
    sources = order[order.numel() - num_rows :]
    slots = torch.full_like(order, -1)
    slots[sources] = torch.arange(num_rows, device=order.device)
    return Layout(slots.view(shape), sources, num_rows == order.numel())


def slotted_layout(slots: Tensor, num_slots: int) -> Layout:
    """The layout of a buffer of fixed size; ``slots`` (tokens, k) must not repeat."""
    flat = slots.reshape(-1)
    spare = torch.where(flat >= 0, flat, num_slots)
    sources = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=flat.device)
    sources[spare] = torch.arange(flat.numel(), device=flat.device)
    return Layout(slots, sources[:-1], False)


def scatter_rows(rows: Tensor, layout: Layout) -> Tensor:
    """(tokens, hidden) -> (num_slots, hidden); empty slots are zero."""
    return _Scatter.apply(rows, layout)


def gather_rows(buffer: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """(num_slots, hidden), (tokens, k) -> (tokens, hidden), the sum of each token's slots times their weights.

    Products and sums are taken in the wider dtype of the two and rounded once, to the buffer's.
    """
    return _Gather.apply(buffer, weights, layout)


def permute(rows: Tensor, order: Tensor) -> Tensor:
    """``rows[order]`` for a permutation, whose gradient needs no additions."""
    return _Permute.apply(rows, order)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.layout = layout
        return _place(rows, None, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(grad, None, ctx.layout), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, weights: Tensor, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.layout = layout
        ctx.save_for_backward(buffer, weights)
        return _sum(buffer, weights, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        buffer, weights = ctx.saved_tensors
        layout: Layout = ctx.layout
        wide = _wide(buffer, weights)
        columns = [
            (grad * _rows_at(buffer, layout.slots[:, choice]).to(wide)).sum(1)
            for choice in range(layout.slots.shape[1])
        ]
        for_weights = torch.stack(columns, 1)
        if not layout.is_full:
            for_weights = torch.where(layout.slots >= 0, for_weights, 0)
        return _place(grad, weights, layout), for_weights.to(weights.dtype), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:  # type: ignore[override]
        ctx.order = order
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows = torch.empty_like(grad)
        rows[ctx.order] = grad
        return rows, None


def _place(rows: Tensor, weights: Tensor | None, layout: Layout) -> Tensor:
    """Every slot's row, times the weight of its route; 0 in empty slots."""
    sources, k = layout.sources, layout.slots.shape[1]
    tokens = sources if k == 1 else torch.div(sources, k, rounding_mode="floor")
    placed = _rows_at(rows, tokens)
    if weights is not None:
        of_slots = _rows_at(weights.reshape(-1, 1), sources)
        of_slots = of_slots if layout.is_full else torch.where((sources >= 0).unsqueeze(1), of_slots, 0)
        return (placed * of_slots).to(rows.dtype)
    return placed if layout.is_full else placed.mul_((sources >= 0).to(placed.dtype).unsqueeze(1))


def _sum(buffer: Tensor, weights: Tensor | None, layout: Layout) -> Tensor:
    """Every token's sum over its slots, times the weights of its routes; a dropped route counts 0."""
    wide = _wide(buffer, weights)
    factors = weights
    if not layout.is_full:
        is_kept = layout.slots >= 0
        factors = is_kept.to(wide) if weights is None else torch.where(is_kept, weights, 0)
    total = None
    for choice in range(layout.slots.shape[1]):
        rows = _rows_at(buffer, layout.slots[:, choice]).to(wide)
        if factors is not None:
            rows.mul_(factors[:, choice : choice + 1])
        total = rows if total is None else total.add_(rows)
    assert total is not None
    return total.to(buffer.dtype)


def _rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, any row where the index is negative, 0 where there are no rows."""
    if rows.shape[0] == 0:
        return rows.new_zeros(index.numel(), rows.shape[1])
    return rows.index_select(0, index.clamp(min=0))


def _wide(buffer: Tensor, weights: Tensor | None) -> torch.dtype:
    """The dtype to add in: at least fp32."""
    wide = torch.promote_types(buffer.dtype, torch.float32)
    return wide if weights is None else torch.promote_types(wide, weights.dtype)
