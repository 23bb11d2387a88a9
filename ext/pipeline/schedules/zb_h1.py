"""1F1B with the backward split, so that weight gradients fill the cooldown."""

from __future__ import annotations

from typing import Literal

from ext.pipeline.actions import Action, F, I, W
from ext.pipeline.schedule import SCHEDULES, Schedule, ScheduleConfig


@SCHEDULES.register("zb_h1")
class ZeroBubbleH1(Schedule):
    """1F1B's order with B split into I and W (ZB-H1 of arXiv:2401.10241).

    On rank r the W of a micro-batch runs r input gradients later, the rest at the end. Bubble: (p-1)(F+I-W) where W
    is no longer than F and I. Peak on every rank: min(p, m) micro-batches, because a deferred W keeps inputs of the
    weights' products and gradients of their outputs, about as much as a forward without recomputation.
    """

    class Config(ScheduleConfig):
        type: Literal["zb_h1"] = "zb_h1"

    def order(self, rank: int) -> list[Action]:
        m = self.shape.num_microbatches
        num_warmup = min(self.shape.num_ranks - rank - 1, m)
        actions = [Action(rank, F, i) for i in range(num_warmup)]
        for i in range(m):
            if num_warmup + i < m:
                actions.append(Action(rank, F, num_warmup + i))
            actions.append(Action(rank, I, i))
            if i >= rank:
                actions.append(Action(rank, W, i - rank))
        return [*actions, *(Action(rank, W, i) for i in range(max(m - rank, 0), m))]

    def max_in_flight(self, rank: int) -> int:
        return min(self.shape.num_ranks, self.shape.num_microbatches)
