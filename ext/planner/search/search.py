"""The search behind `auto`: the named schedules, then annealing from the best of them, then a choice."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ext.pipeline.build import build_plan, plan_of_orders
from ext.pipeline.costs import Costs
from ext.pipeline.plan import Plan
from ext.pipeline.simulate import simulate
from ext.planner.search.anneal import Annealer, Candidate, Found, StoppedBy
from ext.planner.search.list_scheduler import actions_of, list_schedule
from ext.planner.search.presets import PLAIN, Preset, fitting_presets
from ext.planner.search.space import Layout, Space
from ext.planner.search.starts import starts
from ext.recompute.stage_aware import BudgetError

logger = logging.getLogger(__name__)

NAME = "auto"
SEARCHED = "search"
"""What `Chosen.source` says where no named schedule was taken."""

DEFAULT_SECONDS = 5.0
DEFAULT_TOLERANCE = 0.02

ACTIONS_PER_SECOND = 600_000
"""Work planned for one second. A machine that does less is stopped by the clock, and may then find something else."""

MAX_EVALUATIONS = 20_000
"""Steps' worth of work per rank behind which more is not worth its time."""

_SAME = 1.0 + 1e-9


@dataclass(frozen=True)
class Chosen:
    """What `auto` runs, and what it was compared with.

    Attributes:
        plan: validated, with communication.
        layout: layers and recomputed layers of each stage.
        costs: of all stages.
        step_time: simulated, of the plan; where ranks share devices, at least what all work takes on these.
        source: name of the schedule that gave the orders, or `search`.
        best_time: of the best that was found, where plain 1f1b was kept for being almost as good.
        presets: step times of the named schedules that keep the budgets on the space's own layout.
        num_evaluations: candidates that the search looked at.
        stopped_by: what ended it.
        whole_layers: where recomputation was decided unit by unit, the step time of the best with whole layers that
            was found; else None.
    """

    plan: Plan
    layout: Layout
    costs: Costs
    step_time: float
    source: str
    best_time: float
    presets: dict[str, float]
    num_evaluations: int
    stopped_by: StoppedBy
    whole_layers: float | None = None

    def to_json(self) -> dict[str, Any]:
        """What the search has to say beside the plan: both times where plain 1f1b was kept."""
        return {
            "source": self.source,
            "reason": self.reason,
            "step_time": self.step_time,
            "best_time": self.best_time,
            "presets": self.presets,
            "evaluations": self.num_evaluations,
            "stopped_by": self.stopped_by,
            **({} if self.whole_layers is None else {"whole_layers_time": self.whole_layers}),
        }

    @property
    def keeps_plain(self) -> bool:
        """Whether plain 1f1b was taken although something better was found."""
        return self.source == PLAIN and self.step_time > self.best_time * _SAME

    @property
    def reason(self) -> str:
        """One line for people, with the times of plain 1f1b and of whole layers."""
        whole = "" if self.whole_layers is None else f"; whole layers take {self.whole_layers:.6g} at best"
        if self.keeps_plain:
            more = self.step_time / self.best_time - 1.0
            best = f"{more:.1%} more than the best found, {self.best_time:.6g}"
            return f"plain 1f1b kept: {self.step_time:.6g}, {best}{whole}"
        by = "found by search" if self.source == SEARCHED else f"the orders of {self.source}"
        plain = self.presets.get(PLAIN)
        fits = "does not fit" if plain is None else f"takes {plain:.6g}"
        return f"{by}: {self.step_time:.6g}; plain 1f1b {fits}{whole}"


def search(
    space: Space,
    *,
    seconds: float = DEFAULT_SECONDS,
    seed: int = 0,
    tolerance: float = DEFAULT_TOLERANCE,
    on_progress: Callable[[float, float], None] | None = None,
) -> Chosen:
    """Find a schedule, recomputed layers and a layout that keep the budgets and take little time.

    The same arguments give the same result, unless the clock or Ctrl-C ends the search (see `Chosen.stopped_by`):
    the seconds are planned as an amount of work, `ACTIONS_PER_SECOND`, and are a limit besides.

    Args:
        space: what may be chosen.
        seconds: to search for.
        seed: of random choices.
        tolerance: plain 1f1b is kept where it takes at most this share more than the best; 0 takes the best.
        on_progress: called now and then with the share of the work that is done and the best time.

    Returns:
        Never slower than the best named schedule where the tolerance is 0.

    Raises:
        BudgetError: nothing that was tried keeps the budgets.
    """
    deadline = time.monotonic() + seconds
    presets = fitting_presets(space, deadline - seconds / 2)
    actions = 2 * space.num_ranks * space.num_microbatches
    annealer = Annealer(
        space,
        seed=seed,
        max_actions=min(round(seconds * ACTIONS_PER_SECOND), MAX_EVALUATIONS * space.num_ranks * actions),
        deadline=deadline,
        on_progress=on_progress,
    )
    layouts = [preset.layout for preset in presets.values()]
    found = annealer.run(Candidate(*start) for start in starts(space, layouts))
    return _choose(space, presets, found, tolerance)


def _choose(space: Space, presets: dict[str, Preset], found: Found, tolerance: float) -> Chosen:
    best_time = min([found.step_time, *(preset.step_time for preset in presets.values())])
    if best_time == math.inf:
        raise BudgetError(
            f"no schedule of {space.num_microbatches} micro-batches on {space.num_ranks} ranks was found that keeps "
            "the memory budget, with any number of recomputed layers. Raise the budget, use more ranks or a smaller "
            "micro-batch."
        )
    plain = presets.get(PLAIN)
    if plain is not None and plain.step_time <= best_time * (1.0 + tolerance) * _SAME:
        source = PLAIN
    else:
        source = next((name for name, p in presets.items() if p.step_time <= best_time * _SAME), SEARCHED)
    plan, layout = _plan(space, found) if source == SEARCHED else _preset_plan(space, presets[source])
    costs = space.costs(layout)
    return Chosen(
        plan=plan,
        layout=layout,
        costs=costs,
        step_time=max(simulate(plan, costs).step_time, space.work_time(layout)),
        source=source,
        best_time=best_time,
        presets={name: preset.step_time for name, preset in presets.items()},
        num_evaluations=found.num_evaluations,
        stopped_by=found.stopped_by,
    )


def _plan(space: Space, found: Found) -> tuple[Plan, Layout]:
    assert found.candidate is not None
    layout, knobs = found.candidate
    stages = space.stages(layout)
    assert stages is not None
    orders = list_schedule(stages, space.num_microbatches, knobs).orders
    assert orders is not None
    plan = plan_of_orders(
        NAME,
        actions_of(orders),
        rank_of=range(space.num_ranks),
        num_microbatches=space.num_microbatches,
        layers_per_stage=layout.layers,
        recomputed_layers=space.recomputed_layers(layout),
    )
    return plan, layout


def _preset_plan(space: Space, preset: Preset) -> tuple[Plan, Layout]:
    layout = preset.layout
    recomputed = space.recomputed_layers(layout)
    return build_plan(preset.schedule, layers_per_stage=layout.layers, recomputed_layers=recomputed), layout
