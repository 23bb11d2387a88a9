"""Megatron's all-to-all token dispatcher with the exchange of this package: one hop, or two that spare the slow links.

Routing, permutation and experts stay Megatron's. Received rows lie as its own all-to-all leaves them, whatever the
exchange, so results are bit-equal.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from ext.comm.all_to_all import Exchange, HopOrder, LinearExchange, Plan, TwoLevelExchange
from ext.comm.topology import RankGroup, rank_groups
from ext.config import ExtConfig


class ExchangeTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Takes the place of `MoEAlltoAllTokenDispatcher`; until `connect` gives it an exchange it is that one."""

    exchange: Exchange | None = None
    _plan: Plan | None = None

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """As the host's; also tells every rank what it will receive. Collective over the expert-parallel group."""
        tokens_per_expert = super().preprocess(routing_map)
        if self.exchange is not None and not self.drop_and_pad:
            counts = routing_map.sum(dim=0).long().view(self.ep_size, self.num_local_experts)
            self._plan = self.exchange.plan(counts)
        return tokens_per_expert

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by destination rank -> rows by source rank, with their weights. Collective."""
        if self.exchange is None:
            return super().token_dispatch(permutated_local_input_tokens, permuted_probs)
        self.tokens_per_expert: Any = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        if self._plan is not None:
            return self._plan.send_both(permutated_local_input_tokens, permuted_probs)
        return self._even(permutated_local_input_tokens), self._even(permuted_probs)

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """The way of `token_dispatch` in reverse. Collective."""
        if self.exchange is None:
            return super().token_combine(hidden_states, async_finish, allocate_on_comm_stream)
        plan, self._plan = self._plan, None
        return self._even(hidden_states) if plan is None else plan.send_back(hidden_states)

    def _even(self, rows: Tensor) -> Tensor:
        """The exchange where every expert has rows for its whole capacity."""
        assert self.exchange is not None
        return self.exchange.even(rows.view(self.ep_size, -1, *rows.shape[1:])).flatten(0, 1)


def connect(model: nn.Module, config: ExtConfig) -> str:
    """Give every dispatcher of the model its exchange.

    Collective over the world: every rank calls it once, also those without experts.

    Returns:
        What is active and why, for people.
    """
    assert config.moe is not None
    group = parallel_state.get_expert_model_parallel_group()
    assert isinstance(group, torch.distributed.ProcessGroup)
    (ranks,) = rank_groups([group], config.moe.topology.ranks_per_node)
    exchange, text = _exchange(ranks, config.moe.dispatcher)
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, ExchangeTokenDispatcher) and ranks.size > 1:
            dispatcher.exchange = exchange
    return text


def _exchange(group: RankGroup, options: Any) -> tuple[Exchange | None, str]:
    if group.process_group is None:
        return None, "one rank, nothing moves"
    if options.type == "hierarchical" and group.nodes is not None:
        order = HopOrder(options.order or HopOrder.RAIL_FIRST)
        return TwoLevelExchange(group.nodes, order), f"hierarchical ({group.topology}, {order.value})"
    reason = f" ({group.topology})" if options.type == "hierarchical" else ""
    return LinearExchange(group.process_group), f"linear{reason}"
