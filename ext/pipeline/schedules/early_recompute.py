"""1F1B that recomputes while it waits for gradients in the cooldown."""

from __future__ import annotations

from typing import Literal

from ext.pipeline.schedule import SCHEDULES, ScheduleConfig
from ext.pipeline.schedules.one_f_one_b import OneFOneB


@SCHEDULES.register("early_recompute")
class EarlyRecompute(OneFOneB):
    """1F1B with the last p-1-r recomputes of rank r ahead of their gradients (Merak, arXiv:2206.04959).

    Step time m(F+R+B) + (p-1)(F+B) where R <= F. Peak on rank r: min(p-r, m) micro-batches, one of them whole while
    its early recompute waits.
    """

    class Config(ScheduleConfig):
        type: Literal["early_recompute"] = "early_recompute"

    recomputes_by_default = True

    def early_recomputes(self, rank: int) -> frozenset[tuple[int, int]]:
        m = self.shape.num_microbatches
        num_early = min(self.shape.num_ranks - 1 - rank, m)
        return frozenset((rank, i) for i in range(m - num_early, m))
