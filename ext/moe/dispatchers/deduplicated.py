"""Dropless dispatch that sends one copy of a token to each node, and sums inside the node before the way back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ext.comm.all_to_all import LinearExchange, Plan
from ext.comm.topology import NodeGroups, RankGroup
from ext.core.replay import remember
from ext.moe.dispatchers.base import Dispatcher, ExchangeDispatcher, ExchangeState, Routes
from ext.moe.dispatchers.rows import Layout, gather_rows, scatter_rows, sorted_layout, sorted_routes


@dataclass(frozen=True)
class DeduplicatedState:
    """What `combine` needs of one call.

    Attributes:
        layout: this rank's copies, each under the first of the token's choices on its node.
        weights: (tokens, k) weight of each copy: the choice's where it is the only one on that node, else 1,
            since the node has weighted its sum already.
        plan: the exchange between nodes.
        inner: the state of the dispatch inside the node.
        rows_between_nodes: copies that this rank sent to other nodes.
    """

    layout: Layout
    weights: Tensor
    plan: Plan
    inner: ExchangeState
    rows_between_nodes: int


@dataclass(frozen=True)
class _Route:
    layout: Layout
    plan: Plan
    is_single: Tensor
    expert_ids: Tensor
    rows_between_nodes: int


class DeduplicatedDispatcher(Dispatcher):
    """Rail first: a copy of a token goes to the rank with this local index on each node that has its experts.

    There the copies are dispatched inside the node. The experts' rows are those of the linear dispatcher, in the same
    order. A node with several experts of a token returns their weighted sum, so that sums are taken in another
    order: bit-equal up to k = 2, to rounding beyond.

    Raises:
        ConfigError: ``num_experts`` cannot be spread evenly.
    """

    def __init__(self, group: RankGroup, num_experts: int, nodes: NodeGroups, description: str) -> None:
        super().__init__(group, num_experts)
        self._description = description
        self._num_nodes = nodes.topology.num_nodes
        self._per_node = nodes.topology.ranks_per_node * self.num_local_experts
        self._node = nodes.topology.node_of(nodes.topology.ranks.index(torch.distributed.get_rank()))
        self._rail = LinearExchange(nodes.inter_node)
        # Inside the node an "expert" is an expert and the node a row comes from, which keeps linear's order.
        self._inner = ExchangeDispatcher(
            nodes.inside, self._per_node * self._num_nodes, LinearExchange(nodes.intra_node), description
        )

    def _dispatch(self, x: Tensor, routes: Routes) -> tuple[Tensor, list[int], DeduplicatedState]:
        if routes.capacity is not None:
            raise ValueError("a capacity leaves nothing to de-duplicate; use an ExchangeDispatcher")
        topk_ids, topk_probs = routes.ids, routes.probs
        route: _Route = remember(lambda: self._route(topk_ids))
        copies = route.layout.sources
        tokens = torch.div(copies, topk_ids.shape[1], rounding_mode="floor")
        # A node's sum weighs its experts; a single expert's result travels unweighted, so that it is not rounded twice.
        is_single = route.is_single
        inner_probs = torch.where(is_single.reshape(-1)[copies].unsqueeze(1), 1.0, topk_probs.index_select(0, tokens))
        rows, probs = route.plan.send_both(scatter_rows(x, route.layout), inner_probs)
        expert_input, per_kind, inner = self._inner.dispatch(rows, route.expert_ids, probs)
        n = self._num_nodes
        per_expert = [sum(per_kind[i : i + n]) for i in range(0, len(per_kind), n)]
        weights = torch.where(is_single, topk_probs, 1.0)
        state = DeduplicatedState(route.layout, weights, route.plan, inner, route.rows_between_nodes)
        return expert_input, per_expert, state

    def combine(self, expert_output: Tensor, state: DeduplicatedState) -> Tensor:
        sums = self._inner.combine(expert_output, state.inner)
        return gather_rows(state.plan.send_back(sums), state.weights, state.layout)

    def describe(self) -> str:
        return self._description

    def _route(self, ids: Tensor) -> _Route:
        nodes = torch.div(ids, self._per_node, rounding_mode="floor")  # -1 stays -1
        same = nodes.unsqueeze(2) == nodes.unsqueeze(1)
        is_first = ~same.tril(-1).any(2) & (ids >= 0)
        order, counts = sorted_routes(torch.where(is_first, nodes, -1), self._num_nodes)
        plan = self._rail.plan(counts.unsqueeze(1))
        layout = sorted_layout(order, plan.num_sent, ids.shape)
        # Every copy names the token's experts on its node.
        sources = layout.sources
        tokens = torch.div(sources, ids.shape[1], rounding_mode="floor")
        here = nodes[tokens] == nodes.reshape(-1)[sources].unsqueeze(1)
        inside = torch.where(here, ids[tokens] - nodes[tokens] * self._per_node, -1)
        received = plan.there(inside.to(torch.int32)).long()
        source_nodes = torch.repeat_interleave(
            torch.arange(self._num_nodes, device=ids.device), plan.counts[:, 0], output_size=plan.num_received
        )
        kinds = torch.where(received >= 0, received * self._num_nodes + source_nodes.unsqueeze(1), -1)
        return _Route(layout, plan, same.sum(2) == 1, kinds, plan.num_sent - plan.sent[self._node])
