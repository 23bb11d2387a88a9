"""From a group's topology to its dispatcher, with the reason where it is not the one asked for."""

from __future__ import annotations

import logging

from ext.comm.all_to_all import Exchange, HopOrder, LinearExchange, LocalExchange, TwoLevelExchange
from ext.comm.topology import RankGroup, Topology
from ext.moe.dispatchers.auto import AutoDispatcher
from ext.moe.dispatchers.base import Dispatcher, ExchangeDispatcher
from ext.moe.dispatchers.by_mode import ByMode
from ext.moe.dispatchers.deduplicated import DeduplicatedDispatcher

logger = logging.getLogger(__name__)


def linear(group: RankGroup, num_experts: int, reason: str = "") -> Dispatcher:
    """One hop; ``reason`` says why, where something else was asked for."""
    exchange: Exchange = LocalExchange() if group.process_group is None else LinearExchange(group.process_group)
    return ExchangeDispatcher(group, num_experts, exchange, f"linear ({reason})" if reason else "linear")


def hierarchical(
    group: RankGroup, num_experts: int, order: str = HopOrder.RAIL_FIRST, deduplicate: bool | None = None
) -> Dispatcher:
    """Two hops, or linear with one line in the log where the ranks do not form several whole nodes."""
    if group.nodes is None:
        _tell_flat("hierarchical", group.topology)
        return linear(group, num_experts, group.topology.flat_reason)
    hop_order = HopOrder(order)
    text = f"hierarchical ({group.topology}, {hop_order.value}"
    every_copy = ExchangeDispatcher(group, num_experts, TwoLevelExchange(group.nodes, hop_order), f"{text})")
    if deduplicate is None:
        deduplicate = hop_order is HopOrder.RAIL_FIRST
    if not deduplicate:
        return every_copy
    one_copy = DeduplicatedDispatcher(group, num_experts, group.nodes, f"{text}, one copy per node)")
    return ByMode(group, num_experts, every_copy, one_copy)


def auto(group: RankGroup, num_experts: int, probe_seconds: float, probe_file: str | None) -> Dispatcher:
    """The faster of both by message size; linear without a measurement where two hops are impossible."""
    if group.nodes is None:
        _tell_flat("auto", group.topology)
        return linear(group, num_experts, f"auto: {group.topology.flat_reason}")
    return AutoDispatcher(
        group, num_experts, linear(group, num_experts), hierarchical(group, num_experts), probe_seconds, probe_file
    )


def _tell_flat(asked: str, topology: Topology) -> None:
    key = (asked, topology)
    if key in _told:
        return
    _told.add(key)
    level = logging.WARNING if topology.is_irregular else logging.INFO
    logger.log(level, "MoE dispatch: '%s' is linear here: %s", asked, topology)


_told: set[tuple[str, Topology]] = set()
