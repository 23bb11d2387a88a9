"""The dispatcher that chooses linear or two hops by message size, from a measurement."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from ext.comm.agree import extremes
from ext.comm.topology import RankGroup
from ext.moe.dispatchers.base import Dispatcher, Routes
from ext.moe.dispatchers.choosing import ChoosingDispatcher
from ext.moe.probe import Probe, measured
from ext.moe.table import Table

logger = logging.getLogger(__name__)

MOST_KEPT = 1024
"""Choices by size that are kept, so that a call of a known size costs nothing."""


class AutoDispatcher(ChoosingDispatcher):
    """Chooses by size from a measurement; linear within 2 %.

    It measures on the first call, per number of choices and mode, and again for a call much larger than all before.
    Measurements of one ``variant`` do not serve another.
    """

    def __init__(
        self,
        group: RankGroup,
        num_experts: int,
        linear: Dispatcher,
        hierarchical: Dispatcher,
        probe_seconds: float,
        probe_file: str | None,
        variant: str = "",
    ) -> None:
        super().__init__(group, num_experts)
        self.linear = linear
        self.hierarchical = hierarchical
        self._probe_seconds = probe_seconds
        self._probe_file = probe_file
        self._variant = variant
        self._reasons: dict[str, str] = {}
        self._chosen: dict[tuple[int, int | None, int, torch.dtype], Dispatcher] = {}

    def describe(self) -> str:
        if not self._reasons:
            return "auto (not measured yet)"
        return f"auto ({'; '.join(self._reasons.values())})"

    def _choose(self, x: Tensor, routes: Routes) -> Dispatcher:
        rows = routes.max_tokens if routes.capacity is None else routes.capacity
        if rows is None:
            (rows,), _ = extremes(torch.tensor([x.shape[0]], device=x.device), self.group.process_group)
        return self.choose(x, rows, routes.ids.shape[1] if routes.capacity is None else None)

    def choose(self, x: Tensor, rows: int, k: int | None) -> Dispatcher:
        """The faster dispatcher of a call. Collective over the group, whose ranks must give the same.

        Args:
            x: (tokens, hidden), whose width, dtype and device count.
            rows: the most tokens of any rank, or with a capacity the rows of an expert.
            k: choices per token; None with a capacity.
        """
        key = (rows, k, x.shape[1], x.dtype)
        chosen = self._chosen.get(key)
        if chosen is None:
            if len(self._chosen) == MOST_KEPT:  # lengths that never repeat
                self._chosen.clear()
            chosen = self._chosen[key] = self._measured_choice(x, rows, k)
        return chosen

    def _measured_choice(self, x: Tensor, rows: int, k: int | None) -> Dispatcher:
        probe = Probe(self.linear, self.hierarchical, x.shape[1], x.dtype, x.device, k, self._variant)
        size = rows * probe.step
        table = measured(probe, size, self._probe_seconds, self._probe_file)
        is_two_level = table.prefers_hierarchical(size)
        self._tell("with a capacity" if k is None else "dropless", size, table, is_two_level)
        return self.hierarchical if is_two_level else self.linear

    def _tell(self, mode: str, size: int, table: Table, is_two_level: bool) -> None:
        """One line per mode and winner, from the group's first rank."""
        winner = "hierarchical" if is_two_level else "linear"
        key = f"{mode}, {winner}"
        if key in self._reasons:
            return
        one, two = table.times_at(size)
        self._reasons[key] = (
            f"{winner} at {size / 1024:.3g} KiB {mode}: linear {one * 1e3:.3g} ms, hierarchical {two * 1e3:.3g} ms"
        )
        if self.group.topology.ranks[0] == dist.get_rank():
            logger.info("MoE dispatch over %s: %s", self.group.topology, self._reasons[key])
