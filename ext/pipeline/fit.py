"""Fitting a schedule to memory: the fewest recomputed layers that keep a budget, and the time that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ext.pipeline.costs import Costs
from ext.pipeline.memory import Load, heaviest_loads, peak
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import StageModel
from ext.pipeline.timing import OrderCosts

ROUNDING = 1 + 1e-9


class Loads(NamedTuple):
    """The heaviest moments of a stage's rank where it keeps everything, and where it recomputes."""

    keeping: tuple[Load, ...]
    recomputing: tuple[Load, ...]


class Fit(NamedTuple):
    """Recomputed layers of one stage.

    Attributes:
        num_recomputed: the fewest that keep the budget; None where none do.
        memory: what the stage then holds at most; where none keep the budget, the least that it can hold.
    """

    num_recomputed: int | None
    memory: float


def stage_loads(schedule: Schedule, stage: int) -> Loads:
    """What the rank of a stage, its only one, holds under the schedule's order."""
    rank = schedule.rank_of[stage]
    return Loads(*(heaviest_loads(schedule.actions(rank, stages)) for stages in ((), (stage,))))


def fewest_recomputed(loads: Loads, model: StageModel, budget: float, allowed: Sequence[int] | None = None) -> Fit:
    """The fewest recomputed layers with which a stage keeps within its budget, of all or of the allowed numbers."""
    least = float("inf")
    for count in range(len(model.costs)) if allowed is None else allowed:
        costs = model.costs[count]
        size = peak(loads.recomputing if count else loads.keeping, costs) + model.fixed
        if size <= budget * ROUNDING:
            return Fit(count, size)
        least = min(least, size)
    return Fit(None, least)


def step_time(schedule: Schedule, recomputed: Sequence[int], costs: Costs) -> float:
    """Simulated time of a step whose stages recompute so many layers, in the unit of the costs."""
    model = OrderCosts(costs, schedule.rank_of, schedule.shape.num_microbatches)
    recomputing = [stage for stage, count in enumerate(recomputed) if count]
    return model.step_time(
        [model.codes.encode(schedule.actions(rank, recomputing)) for rank in range(schedule.shape.num_ranks)]
    )
