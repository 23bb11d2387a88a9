"""Merak's schedule: the last rank never recomputes and the one before it never waits."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from ext.pipeline.actions import Action, B, F
from ext.pipeline.costs import Costs
from ext.pipeline.schedule import SCHEDULES, ScheduleConfig
from ext.pipeline.schedules.last_no_recompute import LastNoRecompute


@SCHEDULES.register("shifted_critical_path")
class ShiftedCriticalPath(LastNoRecompute):
    """Shifted critical path (Merak, arXiv:2206.04959).

    The last rank never recomputes, so rank p-2 has the most to do. It runs k extra warmup forwards and
    recomputes early, which fills its wait for the first gradient, and pays the extra forwards back by pairing
    its first k+1 backwards. For k=1: ``F0 F1 F2 R0 B0 R1 B1 F3 B2 F4 B3 ...``. A rank d places before it runs
    k-d extra forwards, so that rank p-2 finds its inputs, and recomputes its first k+1-d micro-batches early;
    ranks up to p-3 also recompute the last p-1-r early. All others recompute inside B.

    k follows from the costs (see `num_extra_forwards`); Merak's 1 where none are known, right for R = B - F.
    Step time m(F+R+B) + (p-2)(F+B) where R = F. Peak on rank r: min(max(p-r, 2+k), m) micro-batches, one of
    them whole while its early recompute waits; one on the last rank. With one rank it is 1f1b.
    """

    class Config(ScheduleConfig):
        """``extra_forwards`` fixes k; by default it follows from the costs."""

        type: Literal["shifted_critical_path"] = "shifted_critical_path"
        extra_forwards: Annotated[int, Field(ge=0)] | None = None

    config: Config
    min_microbatches = 4

    @cached_property
    def num_extra_forwards(self) -> int:
        """k: extra warmup forwards of rank p-2, at most m-2."""
        fixed = self.config.extra_forwards
        if fixed is None:
            fixed = 1 if self.costs is None or self.shape.num_ranks == 1 else self._fitting(self.costs)
        return min(fixed, self.shape.num_microbatches - 2)

    def _fitting(self, costs: Costs) -> int:
        """Forwards of rank p-2 that fill its wait for the first gradient, rounded up.

        With its own forwards and R0 it waits for ``F' + B' + 2c - F - R``, where F' and B' are the last
        rank's and c is the time of a message; on equal stages that is B - R. No more is worth filling
        than what makes rank p-2 end later than the last rank lets it.
        """
        last, stage = costs.stages[-1], costs.stages[-2]
        last_backward = last.input_grad + last.weight_grad
        backward = stage.input_grad + stage.weight_grad
        travel = 2 * (costs.latency + stage.message / costs.bandwidth)
        wait = last.forward + last_backward + travel - stage.forward - stage.recompute
        m = self.shape.num_microbatches
        surplus = m * (stage.forward + stage.recompute + backward - last.forward - last_backward)
        excess = wait + surplus - stage.forward - travel - backward
        return max(0, math.ceil(min(wait, excess) / stage.forward - 1e-9))

    def variants(self) -> tuple[ShiftedCriticalPath, ...]:
        """One for every k up to p, unless the options fix it; k=0 is `last_no_recompute`."""
        if self.config.extra_forwards is not None:
            return (self,)
        most = min(self.shape.num_ranks, self.shape.num_microbatches - 2)
        return tuple(
            type(self)(self.config.model_copy(update={"extra_forwards": k}), shape=self.shape, costs=self.costs)
            for k in range(most + 1)
        )

    def order(self, rank: int) -> list[Action]:
        num_warmup = self.max_in_flight(rank)
        actions: list[Action] = []
        num_forwards = 0
        for i in range(self.shape.num_microbatches):
            ahead = min(max(num_warmup, self.shape.num_ranks - rank + i), self.shape.num_microbatches)
            actions += [Action(rank, F, j) for j in range(num_forwards, ahead)]
            actions.append(Action(rank, B, i))
            num_forwards = ahead
        return actions

    def max_in_flight(self, rank: int) -> int:
        if rank == self.shape.num_ranks - 1:
            return 1
        return min(max(self.shape.num_ranks - rank, 2 + self.num_extra_forwards), self.shape.num_microbatches)

    def early_recomputes(self, rank: int) -> frozenset[tuple[int, int]]:
        p = self.shape.num_ranks
        if rank == p - 1:
            return frozenset()
        distance = p - 2 - rank
        num_first = max(0, self.num_extra_forwards + 1 - distance)
        cooldown = super().early_recomputes(rank) if distance > 0 else frozenset()
        return cooldown | {(rank, i) for i in range(num_first)}
