"""The named schedules under a memory budget: what a search has to beat, and where it may start."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from ext.core.errors import ConfigError
from ext.pipeline.fit import ROUNDING, fewest_recomputed, stage_loads, step_time
from ext.pipeline.memory import peak
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.planner.search.space import Layout, Space

PLAIN = "1f1b"


class Preset(NamedTuple):
    """A named schedule on the layout that a search starts from.

    Attributes:
        schedule: with its options, the variant that is fastest.
        layout: with as few recomputed layers as the budgets allow.
        step_time: simulated.
    """

    schedule: Schedule
    layout: Layout
    step_time: float


def fitting_presets(space: Space, deadline: float = math.inf) -> dict[str, Preset]:
    """Every named schedule that can keep the budgets on the space's own layout, by name, the fastest first.

    Behind the deadline, of `time.monotonic`, a schedule that has many variants is judged by the first ones that fit.
    """
    found = []
    for name, schedule in named_schedules(space):
        if not space.recomputes_early and any(map(schedule.early_recomputes, range(space.num_ranks))):
            continue
        timed: list[Preset] = []
        for variant in _variants(schedule, space):
            if timed and time.monotonic() > deadline:
                break
            timed += _fit(variant, space)
        if timed:
            found.append((name, min(timed, key=lambda preset: preset.step_time)))
    return dict(sorted(found, key=lambda entry: entry[1].step_time))


def named_schedules(space: Space) -> Iterator[tuple[str, Schedule]]:
    """The schedules that have a rule and can run in the space, by name."""
    shape = PipelineShape(space.num_ranks, space.num_microbatches)
    for name in SCHEDULES:
        cls = SCHEDULES.get(name)
        if not cls.has_rule:
            continue
        try:
            schedule = cls(shape=shape)
        except ConfigError:
            continue  # not with so few micro-batches
        if space.splits_backward or not schedule.splits_backward:
            yield name, schedule


def _variants(schedule: Schedule, space: Space) -> Iterator[Schedule]:
    """The schedule as it is where it knows the costs, then all its variants."""
    for preset in _fit(schedule, space):
        yield type(schedule)(schedule.config, shape=schedule.shape, costs=space.costs(preset.layout))
    yield from schedule.variants()


def _fit(schedule: Schedule, space: Space) -> Iterator[Preset]:
    """The schedule with the fewest recomputed layers that keep the budgets, where there are any."""
    counts = _recomputed(schedule, space)
    if counts is not None:
        layout = Layout(space.layers_per_stage, counts)
        costs = space.costs(layout)
        yield Preset(schedule, layout, max(step_time(schedule, counts, costs), space.work_time(layout)))


def _recomputed(schedule: Schedule, space: Space) -> tuple[int, ...] | None:
    fixed = space.fixed_recompute(space.layers_per_stage)
    counts = []
    for rank, budget in enumerate(space.budgets):
        model = space.model(rank, space.layers_per_stage)
        loads = stage_loads(schedule, rank)
        if not schedule.may_recompute(rank) and (fixed is None or space.recompute == "all"):
            count = 0  # everything means everything that the schedule's definition lets go
        elif fixed is None:
            count = fewest_recomputed(loads, model, budget).num_recomputed
        else:
            count = fixed[rank]
        if count is None or (count and not schedule.may_recompute(rank)):
            return None
        size = peak(loads.recomputing if count else loads.keeping, model.costs[count]) + model.fixed
        if size > budget * ROUNDING:
            return None
        counts.append(count)
    return tuple(counts)
