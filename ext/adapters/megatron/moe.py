"""Megatron's all-to-all token dispatcher with the exchange of this package: one hop, or two that spare the slow links.

Routing, permutation and experts stay Megatron's. Received rows lie as its own all-to-all leaves them, whatever the
exchange, so results are bit-equal. Ranks that cannot go on together stop with one error that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from ext.adapters.megatron.resolve import runs_plans
from ext.comm.all_to_all import Exchange, HopOrder, LinearExchange, Plan, TwoLevelExchange
from ext.comm.topology import RankGroup, rank_groups
from ext.config import ExtConfig
from ext.core.replay import remember
from ext.moe.agreement import Call, agree
from ext.moe.dispatchers.auto import AutoDispatcher
from ext.moe.dispatchers.base import ExchangeDispatcher
from ext.runtime.alarm import Alarm, routing_errors_told

Chooser = Callable[[Tensor, int, int | None], Exchange]


@dataclass(frozen=True)
class Connection:
    """How the ranks of an expert-parallel group exchange tokens.

    Attributes:
        group: these ranks.
        exchange: of a call, as `AutoDispatcher.choose` takes it; None where nothing moves.
        describe: what is active and why, for people.
        alarm: where an error of this group would not reach all ranks.
        agrees_after: whether what runs the step brings all ranks together over an error.
    """

    group: RankGroup
    exchange: Chooser | None
    describe: Callable[[], str]
    alarm: Alarm | None = None
    agrees_after: bool = False


class ExchangeTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Takes the place of `MoEAlltoAllTokenDispatcher`; until `connect` gives it a connection it is that one."""

    connection: Connection | None = None
    layer = "?"
    _exchange: Exchange | None = None
    _plan: Plan | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """As the host's, where all ranks can go on. Collective over the expert-parallel group.

        Raises:
            RoutingError: on all its ranks; see `ext.moe.agreement.agree`.
        """
        connection = self.connection
        if connection is not None:
            self._exchange = remember(lambda: self._agreed(connection, hidden_states, probs))
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """As the host's; also tells every rank what it will receive. Collective over the expert-parallel group."""
        tokens_per_expert = super().preprocess(routing_map)
        if self._exchange is not None and not self.drop_and_pad:
            counts = routing_map.sum(dim=0).long().view(self.ep_size, self.num_local_experts)
            self._plan = self._exchange.plan(counts)
        return tokens_per_expert

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by destination rank -> rows by source rank, with their weights. Collective."""
        if self._exchange is None:
            return super().token_dispatch(permutated_local_input_tokens, permuted_probs)
        self.tokens_per_expert: Any = self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        if self._plan is not None:
            return self._plan.send_both(permutated_local_input_tokens, permuted_probs)
        return self._even(permutated_local_input_tokens), self._even(permuted_probs)

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """The way of `token_dispatch` in reverse. Collective."""
        if self._exchange is None:
            return super().token_combine(hidden_states, async_finish, allocate_on_comm_stream)
        plan, self._plan = self._plan, None
        return self._even(hidden_states) if plan is None else plan.send_back(hidden_states)

    def _even(self, rows: Tensor) -> Tensor:
        """The exchange where every expert has rows for its whole capacity."""
        assert self._exchange is not None
        return self._exchange.even(rows.view(self.ep_size, -1, *rows.shape[1:])).flatten(0, 1)

    def _agreed(self, connection: Connection, hidden_states: Tensor, probs: Tensor) -> Exchange | None:
        """What this call's rows travel by, once all ranks of the group can go on."""
        config = self.config
        tokens = hidden_states.detach().view(-1, hidden_states.shape[-1])
        k, factor = config.moe_router_topk, config.moe_expert_capacity_factor
        capacity = None
        if self.drop_and_pad:
            assert factor is not None
            capacity = get_capacity(
                num_tokens=tokens.shape[0] * k, num_experts=self.num_experts, capacity_factor=factor
            )
        call = Call(tokens.shape[0], k, factor, tokens.shape[1], tokens.dtype, capacity=capacity)
        with routing_errors_told(connection.alarm, connection.agrees_after):
            # A logit that is not finite leaves no weight of its token finite.
            max_tokens = agree(call, probs.detach(), connection.group, self.layer)
        if connection.exchange is None:
            return None
        return connection.exchange(tokens, *((max_tokens, k) if capacity is None else (capacity, None)))


def connect(model: nn.Module, config: ExtConfig) -> Connection:
    """Give every dispatcher of the model its connection.

    Collective over the world: every rank calls it once, also those without experts.

    Raises:
        ConfigError: on all ranks: the topology does not fit.
    """
    assert config.moe is not None
    group = parallel_state.get_expert_model_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    (ranks,) = rank_groups([group], config.moe.topology.ranks_per_node)
    num_experts = getattr(get_model_config(model), "num_moe_experts", None) or ranks.size
    connection = _connection(ranks, config.moe.dispatcher, num_experts)
    connection = replace(connection, agrees_after=runs_plans(config))
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, ExchangeTokenDispatcher):
            dispatcher.connection, dispatcher.layer = connection, str(getattr(module, "layer_number", "?"))
    return connection


def _connection(group: RankGroup, options: Any, num_experts: int) -> Connection:
    alarm = Alarm.shared() if group.size < dist.get_world_size() else None
    if group.process_group is None:
        return Connection(group, None, lambda: "one rank, nothing moves", alarm)
    reason = "" if options.type == "linear" else str(group.topology)
    linear = _dispatcher(group, num_experts, LinearExchange(group.process_group), "linear", reason)
    if options.type == "linear" or group.nodes is None:
        return Connection(group, lambda *_: linear.exchange, linear.describe, alarm)
    order = HopOrder(getattr(options, "order", HopOrder.RAIL_FIRST))
    two_level = _dispatcher(
        group, num_experts, TwoLevelExchange(group.nodes, order), "hierarchical", f"{group.topology}, {order.value}"
    )
    if options.type == "hierarchical":
        return Connection(group, lambda *_: two_level.exchange, two_level.describe, alarm)
    auto = AutoDispatcher(
        group, num_experts, linear, two_level, options.probe_seconds, options.probe_file, "a copy for every expert"
    )
    return Connection(group, lambda *call: cast(ExchangeDispatcher, auto.choose(*call)).exchange, auto.describe, alarm)


def _dispatcher(group: RankGroup, num_experts: int, exchange: Exchange, name: str, why: str) -> ExchangeDispatcher:
    """What is timed for `auto`: the exchange between rows as Megatron has them, one for every choice."""
    return ExchangeDispatcher(group, num_experts, exchange, f"{name} ({why})" if why else name)
