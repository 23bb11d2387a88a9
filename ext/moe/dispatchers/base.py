"""The interface of a dispatcher, and the dispatcher that needs nothing but an all-to-all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ext.comm.all_to_all import Exchange, Plan, segment_transpose
from ext.comm.topology import RankGroup
from ext.core.errors import ConfigError
from ext.core.replay import remember
from ext.moe.dispatchers.rows import (
    Layout,
    gather_rows,
    permute,
    scatter_rows,
    slotted_layout,
    sorted_layout,
    sorted_routes,
)


@dataclass(frozen=True)
class Routes:
    """Where the tokens of one call go; see `Dispatcher.dispatch`."""

    ids: Tensor
    probs: Tensor
    capacity: int | None
    locations: Tensor | None
    max_tokens: int | None


class Dispatcher(ABC):
    """Takes tokens to the ranks of their experts and the results back. Holds nothing of a batch.

    Every rank of the group must call `dispatch` and `combine`, in the same order; so must their backwards run.
    Several calls may be in flight, each with its own state.

    Args:
        group: the expert-parallel group; rank i of it holds experts i*L to (i+1)*L.
        num_experts: experts of the layer, on all ranks together.
    """

    def __init__(self, group: RankGroup, num_experts: int) -> None:
        if num_experts % group.size:
            raise ConfigError(
                f"num_experts = {num_experts} cannot be spread evenly over ep_size = {group.size} ranks. "
                f"Make num_experts a multiple of {group.size}, or change ep_size."
            )
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size

    def dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_probs: Tensor,
        *,
        capacity: int | None = None,
        locations: Tensor | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Tensor, list[int], Any]:
        """Send every token to its experts. Collective over the group.

        Args:
            x: (tokens, hidden); the number of tokens may differ between ranks, and be 0.
            topk_ids: (tokens, k) int64 expert of each choice, -1 for a choice that is dropped. No expert twice.
            topk_probs: (tokens, k) weight of each choice in the sum of `combine`.
            capacity: rows per expert and source rank, the same on every rank; None for no limit (dropless).
            locations: (tokens, k) row of each choice among those of its expert, where absent counted in the order
                of tokens. A choice at or beyond ``capacity`` is dropped. Only with a capacity.
            max_tokens: the most tokens that any rank has, where the caller knows it.

        Returns:
            With a capacity the experts' input (ranks, local experts, capacity, hidden), zero where empty; without,
            (rows, hidden), by local expert, then by source rank, then in the order of tokens. Then the rows
            of each local expert, and the state that `combine` needs.
        """
        return self._dispatch(x, Routes(topk_ids, topk_probs, capacity, locations, max_tokens))

    @abstractmethod
    def _dispatch(self, x: Tensor, routes: Routes) -> tuple[Tensor, list[int], Any]: ...

    @abstractmethod
    def combine(self, expert_output: Tensor, state: Any) -> Tensor:
        """The weighted sum of each token's results, (tokens, hidden). Collective over the group.

        Args:
            expert_output: of the same shape as the experts' input, but for hidden.
            state: of the `dispatch` that made the input.
        """

    @abstractmethod
    def describe(self) -> str:
        """What is active and why, for people."""


@dataclass(frozen=True)
class ExchangeState:
    """What `combine` needs of one call: where the routes lie, and how rows travelled.

    Attributes:
        layout: routes in this rank's buffer.
        probs: (tokens, k).
        plan: the uneven exchange; None with a capacity.
        order: the received rows by expert; None where they lie so.
    """

    layout: Layout
    probs: Tensor
    plan: Plan | None = None
    order: Tensor | None = None


class ExchangeDispatcher(Dispatcher):
    """Sends every copy of a token by one all-to-all, linear or in two hops: bit-equal whichever it is."""

    def __init__(self, group: RankGroup, num_experts: int, exchange: Exchange, description: str) -> None:
        super().__init__(group, num_experts)
        self.exchange = exchange
        self._description = description

    def _dispatch(self, x: Tensor, routes: Routes) -> tuple[Tensor, list[int], ExchangeState]:
        if routes.capacity is None:
            return self._dispatch_all(x, routes.ids, routes.probs)
        ids, capacity, locations = routes.ids, routes.capacity, routes.locations
        if locations is None:
            locations = count_locations(ids, self.num_experts)
        fits = (ids >= 0) & (locations < capacity)
        slots = torch.where(fits, ids * capacity + locations, -1)
        layout = slotted_layout(slots, self.num_experts * capacity)
        buffer = scatter_rows(x, layout).view(self.group.size, self.num_local_experts, capacity, x.shape[1])
        rows = [self.group.size * capacity] * self.num_local_experts
        return self.exchange.even(buffer), rows, ExchangeState(layout, routes.probs)

    def combine(self, expert_output: Tensor, state: ExchangeState) -> Tensor:
        plan = state.plan
        if plan is None:
            rows = self.exchange.even(expert_output).flatten(0, 2)
        else:
            inverse = None if state.order is None else _inverse(state.order)
            rows = plan.send_back(expert_output if inverse is None else permute(expert_output, inverse))
        return gather_rows(rows, state.probs, state.layout)

    def describe(self) -> str:
        return self._description

    def _dispatch_all(self, x: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, list[int], ExchangeState]:
        plan, layout, order = remember(lambda: self._route(ids))
        rows = plan.send(scatter_rows(x, layout))
        if order is not None:
            rows = permute(rows, order)
        return rows, plan.num_per_kind, ExchangeState(layout, probs, plan, order)

    def _route(self, ids: Tensor) -> tuple[Plan, Layout, Tensor | None]:
        order, counts = sorted_routes(ids, self.num_experts)
        plan = self.exchange.plan(counts.view(self.group.size, self.num_local_experts))
        by_expert = None
        if self.num_local_experts > 1 and self.group.size > 1:
            by_expert = segment_transpose(plan.counts, plan.num_received)
        return plan, sorted_layout(order, plan.num_sent, ids.shape), by_expert


def count_locations(topk_ids: Tensor, num_experts: int) -> Tensor:
    """The row of each route among those to its expert, in the order of tokens; anything where it is dropped."""
    order, counts = sorted_routes(topk_ids, num_experts)
    num_dropped = order.numel() - counts.sum()
    starts = torch.cat([num_dropped.view(1) * 0, num_dropped.view(1), num_dropped + counts.cumsum(0)[:-1]])
    kinds = topk_ids.reshape(-1)[order] + 1
    locations = torch.empty_like(order)
    locations[order] = torch.arange(order.numel(), device=order.device) - starts[kinds]
    return locations.view(topk_ids.shape)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
