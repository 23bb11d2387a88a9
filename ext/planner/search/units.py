"""The search behind `auto` where recomputation is decided unit by unit.

It goes in steps, and takes the best of all that was found:

1. the search of `ext.planner.search.search` with whole layers;
2. the same search with choices of tables in the place of numbers of layers, where R brings back what it can;
3. both orders again, with tables that a solver makes for their waits and their micro-batches in flight;
4. every named schedule, with tables made in the same way;
5. steps 2 and 3 again, with the best of these tables among the choices.

So nothing that a named schedule with units, or a search with whole layers, would give is missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ext.pipeline.actions import Action, Kind
from ext.pipeline.build import build_plan
from ext.pipeline.costs import Costs
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import Schedule
from ext.pipeline.simulate import simulate
from ext.pipeline.stage_model import PipelineProfile
from ext.planner.search.presets import PLAIN, named_schedules
from ext.planner.search.search import SEARCHED, Chosen, search
from ext.planner.search.space import Layout, Space, fixed_stages
from ext.recompute.choices import StageChoices, keeps_budgets, more_choices, stage_choices, tables_of_plan
from ext.recompute.pipeline_tables import PipelineTables, UnitCostsOfStages, choose_tables
from ext.recompute.stage_aware import BudgetError
from ext.recompute.stage_tables import Solve

NUM_ADDED = 3
"""Candidates whose tables become choices of the last search."""

_SAME = 1.0 + 1e-9


@dataclass(frozen=True)
class UnitProblem:
    """What is to be decided.

    Attributes:
        schedule: the one asked for, by which plans of searched orders go.
        profile: of the stages.
        units: of their layers.
        budgets: bytes that each stage's rank may hold.
        solve: finds tables; see `ext.recompute.stage_tables`.
        overlap: whether recomputation may run ahead of the backward, and under all-reduces.
    """

    schedule: Schedule
    profile: PipelineProfile
    units: UnitCostsOfStages
    budgets: tuple[int, ...]
    solve: Solve
    overlap: bool = True


@dataclass(frozen=True)
class _Candidate:
    """A plan with tables, or one with whole layers.

    Attributes:
        source: name of the schedule that gave the orders, or `search`.
        step_time: simulated; where ranks share devices, at least what all work takes on these.
        tables: None with whole layers.
    """

    source: str
    step_time: float
    tables: PipelineTables | None


class _Orders(Schedule):
    """The orders of a plan, without its R."""

    def __init__(self, plan: Plan, like: Schedule) -> None:
        super().__init__(like.config, shape=like.shape)
        self._plan = plan

    def order(self, rank: int) -> list[Action]:
        return [action for action in self._plan.compute_order(rank) if action.kind is not Kind.R]

    def max_in_flight(self, rank: int) -> int:
        return self.shape.num_microbatches


def search_units(
    space: Space, problem: UnitProblem, *, seconds: float, tolerance: float, **options: Any
) -> tuple[Chosen, PipelineTables | None]:
    """Find a schedule and tables that keep the budgets and take little time.

    Args:
        space: with whole layers, which stay on their stages.
        problem: see `UnitProblem`.
        seconds: for the search with whole layers, and for those with tables together.
        tolerance: plain 1f1b is kept where it takes at most this share more than the best; 0 takes the best.
        options: of every search, see `search`.

    Returns:
        What was chosen, and its tables; None where whole layers are as fast or faster. With a tolerance of 0 never
        slower than a search with whole layers, nor than the tables under any named schedule.

    Raises:
        BudgetError: nothing that was tried keeps the budgets.
    """
    problem = replace(problem, solve=cache(problem.solve))
    space = replace(space, recomputes_early=problem.overlap, _stages={})
    tried = _Tried(space, problem)
    whole, refused = _attempt(lambda: search(space, seconds=seconds, tolerance=tolerance, **options))
    if whole is not None:  # first: taken where tables are no better
        tried.searches.append(whole)
        tried.candidates.append(_Candidate(whole.source, whole.step_time, None))
        tried.solve_orders_of(whole)
    choices = _choices(space, problem)
    tried.search_among(choices, seconds=seconds / 2, **options)
    for name, schedule in named_schedules(space):
        for variant in schedule.variants():
            if name == PLAIN or tried.may_be_better(variant):
                tried.solve(name, variant)
    best = tried.best_tables(NUM_ADDED)
    more = [
        more_choices(problem.profile, stage, of_stage, [tables.stages[stage] for tables in best])
        for stage, of_stage in enumerate(choices)
    ]
    tried.search_among(more, seconds=seconds / 2, **options)
    if not tried.candidates:
        assert refused is not None
        raise refused
    return _choose(tried, whole, tolerance)


def _attempt(make: Callable[[], Chosen]) -> tuple[Chosen | None, BudgetError | None]:
    """What it makes, or why nothing fits."""
    try:
        return make(), None
    except BudgetError as error:
        return None, error


def _choices(space: Space, problem: UnitProblem) -> list[StageChoices]:
    m, p = space.num_microbatches, space.num_ranks
    return [
        stage_choices(problem.profile, stage, units, min(p - stage, m), overlap=problem.overlap)
        for stage, units in enumerate(problem.units)
    ]


class _Tried:
    """Everything that was tried and keeps the budgets."""

    def __init__(self, space: Space, problem: UnitProblem) -> None:
        self.space, self._problem = space, problem
        self.candidates: list[_Candidate] = []
        self.searches: list[Chosen] = []

    @property
    def best(self) -> _Candidate:
        return min(self.candidates, key=lambda candidate: candidate.step_time)

    def best_tables(self, count: int) -> list[PipelineTables]:
        """Those of so many candidates, the fastest first."""
        ordered = sorted(self.candidates, key=lambda candidate: candidate.step_time)
        return [candidate.tables for candidate in ordered if candidate.tables is not None][:count]

    def search_among(self, choices: Sequence[StageChoices], **options: Any) -> None:
        """Take what a search finds with these choices, and what a solver makes of its orders."""
        models = fixed_stages([of_stage.model for of_stage in choices])
        among = replace(self.space, models=models, _stages={})
        found, _ = _attempt(lambda: search(among, tolerance=0.0, **options))
        if found is None:
            return
        self.searches.append(found)
        stages = [of_stage.tables[choice] for of_stage, choice in zip(choices, found.layout.recomputed, strict=True)]
        problem, step_time = self._problem, found.step_time
        made_for = found.plan, stages, problem.profile, problem.budgets, step_time
        self.take(_Candidate(found.source, step_time, tables_of_plan(problem.schedule, *made_for)))
        self.solve_orders_of(found)

    def solve_orders_of(self, searched: Chosen) -> None:
        """Take what a solver makes of the orders that a search found."""
        if searched.source == SEARCHED:
            self.solve(SEARCHED, _Orders(searched.plan, self._problem.schedule))

    def take(self, candidate: _Candidate) -> None:
        assert candidate.tables is not None
        if keeps_budgets(candidate.tables, self._problem.profile, self._problem.budgets):
            self.candidates.append(candidate)

    def may_be_better(self, schedule: Schedule) -> bool:
        """Whether the schedule would be faster than the best so far if nothing had to be recomputed."""
        nothing, layers = (0,) * self.space.num_ranks, self.space.layers_per_stage
        plan = build_plan(schedule, layers_per_stage=layers, recomputed_layers=nothing)
        costs = Costs(tuple(stage.costs(0) for stage in self._problem.profile.stages))
        return not self.candidates or simulate(plan, costs).step_time < self.best.step_time

    def solve(self, source: str, schedule: Schedule) -> None:
        """Take what a solver makes of the schedule, where it keeps the budgets."""
        problem = self._problem
        try:
            tables = choose_tables(
                schedule,
                problem.profile,
                problem.units,
                problem.budgets,
                problem.solve,
                layers_per_stage=self.space.layers_per_stage,
                overlap=problem.overlap,
            )
        except BudgetError:
            return
        self.take(_Candidate(source, max(tables.step_time, self.space.work_time_of(tables.costs)), tables))


def _choose(tried: _Tried, whole: Chosen | None, tolerance: float) -> tuple[Chosen, PipelineTables | None]:
    """The best, or plain 1f1b where that is almost as good."""
    space, taken = tried.space, tried.best
    best_time = min(taken.step_time, math.inf if whole is None else whole.best_time)
    plain = [c for c in tried.candidates if c.source == PLAIN and c.step_time <= best_time * (1 + tolerance) * _SAME]
    if plain:
        taken = min(plain, key=lambda candidate: candidate.step_time)
    searches = tried.searches
    presets: dict[str, float] = {}
    for name, step_time in (
        *((c.source, c.step_time) for c in tried.candidates if c.source != SEARCHED),
        *(entry for searched in searches for entry in searched.presets.items()),
    ):
        presets[name] = min(step_time, presets.get(name, math.inf))
    others: dict[str, Any] = {
        "best_time": best_time,
        "presets": dict(sorted(presets.items(), key=lambda entry: entry[1])),
        "num_evaluations": sum(searched.num_evaluations for searched in searches),
        "whole_layers": None if whole is None else whole.best_time,
    }
    if taken.tables is None:
        assert whole is not None
        return replace(whole, **others), None
    chosen = Chosen(
        plan=taken.tables.plan,
        layout=Layout(space.layers_per_stage, taken.tables.plan.recomputed_layers),
        costs=Costs(taken.tables.costs, space.latency, space.bandwidth),
        step_time=taken.step_time,
        source=taken.source,
        stopped_by=searches[-1].stopped_by if searches else "work",
        **others,
    )
    return chosen, taken.tables
