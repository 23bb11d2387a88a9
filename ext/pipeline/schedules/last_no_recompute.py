"""Early recomputes on 1F1B whose last rank recomputes nothing."""

from __future__ import annotations

from typing import Literal

from ext.pipeline.schedule import SCHEDULES, ScheduleConfig
from ext.pipeline.schedules.early_recompute import EarlyRecompute


@SCHEDULES.register("last_no_recompute")
class LastNoRecompute(EarlyRecompute):
    """Early recompute with a last rank that keeps everything (Merak, arXiv:2206.04959).

    The last rank holds one micro-batch at a time, so keeping it costs one stage's activations and takes R off
    the critical path there. Rank p-2 recomputes its first micro-batch early; the cooldown rule holds on ranks
    up to p-3. Step time m(F+R+B) + (p-2)(F+B) + (B-R) where R = F <= B. Peak on rank r: min(p-r, m) micro-batches.
    """

    class Config(ScheduleConfig):
        type: Literal["last_no_recompute"] = "last_no_recompute"

    def early_recomputes(self, rank: int) -> frozenset[tuple[int, int]]:
        p = self.shape.num_ranks
        if rank == p - 1:
            return frozenset()
        if rank == p - 2:
            return frozenset({(rank, 0)})
        return super().early_recomputes(rank)

    def may_recompute(self, stage: int) -> bool:
        return self.rank_of[stage] != self.shape.num_ranks - 1
