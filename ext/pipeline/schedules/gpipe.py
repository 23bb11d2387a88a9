"""All forwards, then all backwards."""

from __future__ import annotations

from typing import Literal

from ext.pipeline.actions import Action, B, F
from ext.pipeline.schedule import SCHEDULES, Schedule, ScheduleConfig


@SCHEDULES.register("gpipe")
class GPipe(Schedule):
    """All forwards, then all backwards (GPipe, arXiv:1811.06965).

    Backwards run in the order of the forwards, so gradients are summed as in `1f1b`, to the same bits.
    Bubble: (p-1)(F+B), where B includes an inline recompute. Peak on every rank: m micro-batches.
    """

    class Config(ScheduleConfig):
        type: Literal["gpipe"] = "gpipe"

    def order(self, rank: int) -> list[Action]:
        return [Action(rank, kind, i) for kind in (F, B) for i in range(self.shape.num_microbatches)]

    def max_in_flight(self, rank: int) -> int:
        return self.shape.num_microbatches
