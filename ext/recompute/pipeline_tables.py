"""Tables for every stage of a pipeline, and the plan that goes with them: waits become R actions. No torch.

For any host: what it needs is a schedule, a profile of the stages and the costs of their units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ext.cost.profile import LayerProfile
from ext.pipeline.build import build_plan, plan_of_orders
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.passes import place_recomputes
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import Schedule
from ext.pipeline.simulate import Simulation, simulate
from ext.pipeline.stage_model import PipelineProfile
from ext.recompute.problem import InfeasibleBudget
from ext.recompute.stage_aware import BudgetError
from ext.recompute.stage_tables import (
    Solve,
    StageLayers,
    StageTables,
    seconds,
    size,
    solve_stage,
    working_set,
    worth_deciding,
)
from ext.recompute.units import LayerCosts, UnitCosts
from ext.recompute.waits import StageWaits, stage_waits
from ext.recompute.windows import BEFORE_BACKWARD, IN_BACKWARD, ON_DEMAND, UNDER_FORWARD, WAIT

UnitCostsOfStages = Sequence[Sequence[LayerCosts | None]]
"""By stage, the costs of its layers; None for one that is never recomputed."""


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
        self.whole = [stage.costs(0) for stage in profile.stages]
        plan = build_plan(schedule, layers_per_stage=layers_per_stage, recomputed_layers=(0,) * len(budgets))
        self.simulation: Simulation = simulate(plan, Costs(tuple(self.whole)))
        ranks = schedule.rank_of
        self.held = [plan.max_deferred(rank) for rank in ranks]
        self.in_flight = [self.simulation.peak_in_flight[rank] for rank in ranks]
        self.waits: list[StageWaits] = [
            stage_waits(self.simulation, stage, 1) if overlap else StageWaits((), frozenset())
            for stage in range(len(budgets))
        ]

    def _beside(self, stage: int) -> int:
        """Bytes that the stage holds whatever the tables say."""
        always = round(self.whole[stage].activations)
        for costs, layer in zip(self.units[stage], self.profile.stages[stage].layers, strict=False):
            if costs is not None:
                always -= costs.activation_bytes - _unsaved_input(layer)
        return self.profile.fixed(stage) + self.in_flight[stage] * always

    def solve(self, stage: int, solve: Solve) -> StageTables | int:
        """The tables of a stage; where none fit, the least bytes that it needs."""
        budget = self.budgets[stage] - self._beside(stage)
        layers = StageLayers(
            self.units[stage],
            self.in_flight[stage],
            budget,
            self.waits[stage].window,
            self.held[stage],
            # The last micro-batches' backwards come when all forwards are done.
            min(1.0, (self.in_flight[stage] - 1) / self.schedule.shape.num_microbatches),
        )
        try:
            return solve_stage(layers, solve)
        except InfeasibleBudget as error:
            return self._beside(stage) + error.smallest_budget

    def needed(self, stage: int, tables: StageTables) -> int:
        """Bytes of a stage under its tables."""
        return self._beside(stage) + tables.bytes

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
        costs = tuple(
            table_costs(whole, tables, is_split=held > 0)
            for whole, tables, held in zip(self.whole, stages, self.held, strict=True)
        )
        return PipelineTables(
            schedule=self.schedule,
            plan=with_tables(plan, stages),
            stages=tuple(stages),
            costs=costs,
            early=early_shares(plan),
            step_time=simulate(plan, Costs(costs)).step_time,
            reserves=tuple(self._reserve(s, tables) for s, tables in enumerate(stages)),
        )

    def _reserve(self, stage: int, tables: StageTables) -> int:
        """What recomputed values may hold: all that the budget leaves beside what is kept."""
        kept = self.in_flight[stage] * tables.kept_bytes
        inputs = sum(part.problem.input_bytes for part in tables.parts)
        return self.budgets[stage] - self._beside(stage) - inputs - kept


def early_shares(plan: Plan) -> tuple[float, ...]:
    """By stage, the share of micro-batches that have an R."""
    with_r = Counter(stage for stage, _ in plan.early_recomputes)
    return tuple(with_r[stage] / plan.num_microbatches for stage in range(plan.num_stages))


def with_tables(plan: Plan, stages: Sequence[StageTables]) -> Plan:
    """The plan, saying what is done with every unit."""
    return replace(plan, unit_tables=tuple(tuple(table.decisions for table in stage.tables) for stage in stages))


def table_costs(whole: StageCosts, tables: StageTables, *, is_split: bool = False) -> StageCosts:
    """A stage's costs under its tables, as simulator and memory table understand them.

    What runs before the backward is its recompute; what runs on demand beside that is a part of the backward.

    Args:
        whole: costs where nothing is recomputed.
        tables: of the stage.
        is_split: whether its backwards are split.
    """
    early, late, everything = tables.recomputed(*BEFORE_BACKWARD), tables.recomputed(*IN_BACKWARD), tables.recomputed()
    exposed = seconds(tables.recomputed(ON_DEMAND))  # what runs under all-reduces takes no time
    costs = replace(
        whole,
        recompute=exposed + seconds(tables.recomputed(WAIT)),
        dropped=size(everything),
        stash=tables.read_again + _temporary(everything),
        working_set=working_set(tables),
    )
    if not any(early):
        return costs
    costs = replace(costs, recompute=seconds(tables.recomputed(WAIT)), input_grad=whole.input_grad + exposed)
    if is_split:  # holds what it recomputed until its weight gradients are done
        return costs
    back = size(early) + working_set(tables, *IN_BACKWARD)
    return replace(
        costs,
        activations=whole.activations - (size(late) - _temporary(late)) + working_set(tables, *IN_BACKWARD),
        dropped=back,
        stash=tables.read_again + _temporary(early),
        # Under another micro-batch's forward the values of all layers come back, without an R.
        working_set=back if any(tables.recomputed(*UNDER_FORWARD)) else costs.working_set,
    )


def _temporary(layers: Sequence[Sequence[UnitCosts]]) -> int:
    """Bytes that recomputes bring back and the backward does not need: no forward would have kept them."""
    return sum(unit.bytes - unit.held for units in layers for unit in units)


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
