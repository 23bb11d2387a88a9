"""The base of the Merak family and the plain answer where nothing else pays."""

from __future__ import annotations

from typing import Literal

from ext.pipeline.actions import Action, B, F
from ext.pipeline.schedule import SCHEDULES, Schedule, ScheduleConfig


@SCHEDULES.register("1f1b")
class OneFOneB(Schedule):
    """One forward, one backward (PipeDream-Flush, arXiv:2006.09503).

    Bubble: (p-1)(F+B), where B includes an inline recompute. Peak on rank r: min(p-r, m) micro-batches.
    """

    class Config(ScheduleConfig):
        type: Literal["1f1b"] = "1f1b"

    def order(self, rank: int) -> list[Action]:
        m = self.shape.num_microbatches
        forward = [Action(rank, F, i) for i in range(m)]
        backward = [Action(rank, B, i) for i in range(m)]
        num_warmup = min(self.shape.num_ranks - rank - 1, m)
        steady = [action for pair in zip(forward[num_warmup:], backward, strict=False) for action in pair]
        return [*forward[:num_warmup], *steady, *backward[m - num_warmup :]]

    def max_in_flight(self, rank: int) -> int:
        return min(self.shape.num_ranks - rank, self.shape.num_microbatches)
