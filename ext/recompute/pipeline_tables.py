"""Tables for every stage of a pipeline, and the plan that goes with them: waits become R actions. No torch.

For any host: what it needs is a schedule, a profile of the stages and the costs of their units.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ext.cost.profile import LayerProfile
from ext.pipeline.build import build_plan, plan_of_orders
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.memory import heaviest_loads, peak
from ext.pipeline.passes import place_recomputes
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import Schedule
from ext.pipeline.simulate import simulate
from ext.pipeline.stage_model import PipelineProfile
from ext.recompute.problem import InfeasibleBudget
from ext.recompute.stage_aware import BudgetError
from ext.recompute.stage_costs import reserve_bytes, table_costs
from ext.recompute.stage_tables import Solve, StageLayers, StageTables, solve_stage, worth_deciding
from ext.recompute.units import LayerCosts
from ext.recompute.waits import StageWaits, stage_waits
from ext.recompute.windows import BEFORE_BACKWARD

UnitCostsOfStages = Sequence[Sequence[LayerCosts | None]]
"""By stage, the costs of its layers; None for one that is never recomputed."""

_TRIALS = 6
"""For one moment of a split backward: budgets are lowered by what their tables hold too much elsewhere."""


@dataclass(frozen=True)
class PipelineTables:
    """What was decided for a pipeline.

    Attributes:
        schedule: the one asked for, or a variant of it.
        plan: with an R before every backward that a pipeline wait precedes, on stages that use it.
        stages: tables by stage.
        costs: of each stage under its tables.
        early: by stage, the share of micro-batches that have an R.
        step_time: simulated seconds.
        reserves: by stage, bytes that recomputed values may hold at once.
    """

    schedule: Schedule
    plan: Plan
    stages: tuple[StageTables, ...]
    costs: tuple[StageCosts, ...]
    early: tuple[float, ...]
    step_time: float
    reserves: tuple[int, ...]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        plan: Plan,
        stages: Sequence[StageTables],
        profile: PipelineProfile,
        budgets: Sequence[int],
    ) -> PipelineTables:
        """Tables that a plan, with every R, was made for or is to be run with; the plan will say them."""
        costs = tuple(map(table_costs, profile.stages, stages))
        return cls(
            schedule=schedule,
            plan=with_tables(plan, stages),
            stages=tuple(stages),
            costs=costs,
            early=early_shares(plan),
            step_time=simulate(plan, Costs(costs)).step_time,
            reserves=tuple(
                reserve_bytes(plan.orders[plan.rank_of[s]], of_stage, budgets[s] - profile.fixed(s))
                for s, of_stage in enumerate(costs)
            ),
        )

    @property
    def fell_back(self) -> list[int]:
        """Stages for which a search ran out of time and a greedy table stands in."""
        return [s for s, tables in enumerate(self.stages) if any(part.solution.fell_back for part in tables.parts)]

    def to_json(self) -> list[dict[str, Any]]:
        """By stage: tables by layer, and how good they are."""
        return [
            {
                "layers": [table.to_json() for table in tables.tables],
                "exposed_s": tables.exposed,
                "bound_s": sum(part.solution.bound for part in tables.parts),
                "search_s": sum(part.solution.seconds for part in tables.parts),
                "methods": [part.solution.method for part in tables.parts],
                "fell_back": stage in self.fell_back,
                "saved_bytes": tables.saved_bytes,
            }
            for stage, tables in enumerate(self.stages)
        ]


def choose_tables(
    schedule: Schedule,
    profile: PipelineProfile,
    units: UnitCostsOfStages,
    budgets: Sequence[int],
    solve: Solve,
    *,
    layers_per_stage: Sequence[int],
    overlap: bool = True,
    show: Callable[[float], str] = "{:.4g}".format,
) -> PipelineTables:
    """The tables of every stage under the variant of the schedule that is simulated to take least time.

    Args:
        schedule: with one stage per rank.
        profile: of the stages.
        units: of their layers.
        budgets: bytes that each stage's rank may hold.
        solve: see `solve_stage`.
        layers_per_stage: layers of each stage.
        overlap: whether pipeline waits are used.
        show: writes bytes with their unit.

    Raises:
        BudgetError: some stage cannot keep within its budget; names the smallest that it can.
    """
    found: list[PipelineTables] = []
    needs: list[list[int]] = []
    for variant in schedule.variants():
        pipeline = _Pipeline(variant, profile, units, budgets, layers_per_stage, overlap)
        solved = [pipeline.solve(stage, solve) for stage in range(len(budgets))]
        stages = [tables for tables in solved if isinstance(tables, StageTables)]
        if len(stages) == len(budgets):
            found.append(pipeline.planned(stages))
        needs.append([need if isinstance(need, int) else pipeline.needed(s, need) for s, need in enumerate(solved)])
    if not found:
        least = min(needs, key=lambda need: max(n / b for n, b in zip(need, budgets, strict=True)))
        raise BudgetError(*_too_small(schedule, least, budgets, show))
    return min(found, key=lambda tables: tables.step_time)


class _Held(NamedTuple):
    """What a stage holds at some moment.

    Attributes:
        in_flight: micro-batches that hold what their forward kept.
        waiting: micro-batches between I and W.
    """

    in_flight: int
    waiting: int = 0


class _Pipeline:
    """One schedule and what its stages have to decide."""

    def __init__(
        self,
        schedule: Schedule,
        profile: PipelineProfile,
        units: UnitCostsOfStages,
        budgets: Sequence[int],
        layers_per_stage: Sequence[int],
        overlap: bool,
    ) -> None:
        self.schedule, self.profile, self.budgets, self.overlap = schedule, profile, budgets, overlap
        self.layers_per_stage = tuple(layers_per_stage)
        self.units = [
            tuple(c if c is not None and schedule.may_recompute(i) and worth_deciding(c) else None for c in stage)
            for i, stage in enumerate(units)
        ]
        if not overlap:
            self.units = [tuple(c and replace(c, all_reduces=None) for c in stage) for stage in self.units]
        plan = build_plan(schedule, layers_per_stage=layers_per_stage, recomputed_layers=(0,) * len(budgets))
        simulation = simulate(plan, Costs(tuple(stage.costs(0) for stage in profile.stages)))
        self.waits: list[StageWaits] = [
            stage_waits(simulation, stage, 1) if overlap else StageWaits((), frozenset())
            for stage in range(len(budgets))
        ]

    def _beside(self, stage: int, held: _Held) -> int:
        """Bytes that the stage holds whatever the tables say."""
        whole = self.profile.stages[stage].costs(0)
        always = round(whole.activations)
        for costs, layer in zip(self.units[stage], self.profile.stages[stage].layers, strict=False):
            if costs is not None:
                always -= costs.activation_bytes - _unsaved_input(layer)
        return self.profile.fixed(stage) + held.in_flight * always + round(held.waiting * whole.split_memory.waiting)

    def solve(self, stage: int, solve: Solve) -> StageTables | int:
        """The tables of a stage; where none fit, the least bytes that it needs."""
        budget, moments = self.budgets[stage], self._moments(stage)
        if not any(held.waiting for held in moments):
            return self._solve_for(stage, moments[0], budget, solve)
        # The backward is split: which moment is the heaviest depends on the tables. HEU is quick enough to try.
        from ext.recompute.heu import solve_heu  # reading a configuration must not import scipy

        everything = self._solve_for(stage, moments[0], sys.maxsize, solve_heu)
        assert isinstance(everything, StageTables)
        needs = [self.needed(stage, everything)]
        if needs[0] <= budget:  # nothing to recompute, though the least table of some moment may not fit
            return everything
        found: list[tuple[StageTables, _Held, int]] = []
        for held in moments:
            given = budget
            for _ in range(_TRIALS):
                tables = self._solve_for(stage, held, given, solve_heu)
                if isinstance(tables, int):
                    given = tables
                    continue
                needs.append(self.needed(stage, tables))
                if needs[-1] <= budget:
                    found.append((tables, held, given))
                    break
                if given > budget:  # the least of this moment, which is too much for another one
                    break
                # Other tables: those that were found fit all of what they take themselves.
                given = min(given - (needs[-1] - budget), self._beside(stage, held) + tables.bytes - 1)
        if not found:
            return min(needs)
        tables, held, given = min(found, key=lambda entry: entry[0].exposed)
        others = self._solve_for(stage, held, given, solve)
        if isinstance(others, int) or others.exposed > tables.exposed or self.needed(stage, others) > budget:
            return tables
        return others

    def _moments(self, stage: int) -> list[_Held]:
        """What the stage may hold at its heaviest, most micro-batches in flight first; one where no backward splits."""
        loads = heaviest_loads(self.schedule.order(self.schedule.rank_of[stage]))
        found = {_Held(load.kept, load.waiting) for load in loads if load.kept}
        # An I leaves more for its W than it finds where much is recomputed.
        found |= {_Held(max(1, load.kept - 1), load.waiting + 1) for load in loads if load.splitting}
        return sorted(found, reverse=True)

    def _solve_for(self, stage: int, held: _Held, budget: int, solve: Solve) -> StageTables | int:
        """Tables that keep a budget at one moment, or the smallest budget that some keep."""
        # The last micro-batches' backwards come when all forwards are done.
        exposed = min(1.0, (held.in_flight - 1) / self.schedule.shape.num_microbatches)
        beside, windows = self._beside(stage, held), self.waits[stage].window
        layers = StageLayers(self.units[stage], held.in_flight, budget - beside, windows, forward_exposed=exposed)
        try:
            return solve_stage(layers, solve)
        except InfeasibleBudget as error:
            return beside + error.smallest_budget

    def needed(self, stage: int, tables: StageTables) -> int:
        """Bytes of a stage under its tables."""
        moments = self._moments(stage)
        if not any(held.waiting for held in moments):
            return self._beside(stage, moments[0]) + tables.bytes
        recomputing = [stage] if any(tables.recomputed(*BEFORE_BACKWARD)) else []
        early = {(stage, microbatch) for microbatch in self.waits[stage].microbatches}
        order = place_recomputes(self.schedule.order(self.schedule.rank_of[stage]), early, recomputing)
        costs = table_costs(self.profile.stages[stage], tables)
        return math.ceil(peak(heaviest_loads(order), costs)) + self.profile.fixed(stage)

    def planned(self, stages: Sequence[StageTables]) -> PipelineTables:
        waiting = {s for s, tables in enumerate(stages) if any(tables.recomputed(*BEFORE_BACKWARD))}
        early = {(s, m) for s in waiting for m in self.waits[s].microbatches}
        shape, ranks = self.schedule.shape, range(self.schedule.shape.num_ranks)
        plan = plan_of_orders(
            self.schedule.config.type,
            [place_recomputes(self.schedule.order(rank), early, waiting) for rank in ranks],
            rank_of=self.schedule.rank_of,
            num_microbatches=shape.num_microbatches,
            layers_per_stage=self.layers_per_stage,
            recomputed_layers=[tables.num_recomputing for tables in stages],
            max_in_flight=[self.schedule.max_in_flight(rank) for rank in ranks],
        )
        return PipelineTables.of(self.schedule, plan, stages, self.profile, self.budgets)


def early_shares(plan: Plan) -> tuple[float, ...]:
    """By stage, the share of micro-batches that have an R."""
    with_r = Counter(stage for stage, _ in plan.early_recomputes)
    return tuple(with_r[stage] / plan.num_microbatches for stage in range(plan.num_stages))


def with_tables(plan: Plan, stages: Sequence[StageTables]) -> Plan:
    """The plan, saying what is done with every unit."""
    return replace(plan, unit_tables=tuple(tuple(table.decisions for table in stage.tables) for stage in stages))


def _unsaved_input(layer: LayerProfile) -> int:
    """Bytes of a layer's inputs that its own backward does not need: they are held only because it is recomputed."""
    return layer.bytes_of(layer.inputs) - layer.bytes_of(tuple(set(layer.inputs) & set(layer.saved)))


def _too_small(
    schedule: Schedule, smallest: Sequence[int], budgets: Sequence[int], show: Callable[[float], str]
) -> list[str]:
    name = schedule.config.type
    problems = [
        f"stage {stage} needs at least {show(least)}, the budget is {show(budget)}."
        for stage, (least, budget) in enumerate(zip(smallest, budgets, strict=True))
        if least > budget
    ]
    return [
        *problems,
        f"Smallest budgets that schedule '{name}' can keep, by stage: {', '.join(map(show, smallest))}. Raise the "
        "budget to these, use more stages, a smaller micro-batch or a schedule that holds fewer micro-batches.",
    ]
