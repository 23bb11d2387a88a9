"""What a search over orders may choose for a stage: tables from keeping everything to keeping least. No torch.

An order decides when an R action runs, so these tables leave to R whatever could also run on demand. A solver then
fills the waits of the order that was found (`ext.recompute.pipeline_tables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ext.pipeline.actions import R
from ext.pipeline.build import plan_of_orders
from ext.pipeline.costs import StageCosts
from ext.pipeline.memory import heaviest_loads, peak
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import PipelineProfile, Stage, StageModel
from ext.recompute.pipeline_tables import PipelineTables
from ext.recompute.problem import InfeasibleBudget
from ext.recompute.stage_costs import table_costs
from ext.recompute.stage_tables import Part, Solve, StageLayers, StageTables, seconds, solve_stage, worth_deciding
from ext.recompute.table import KEEP, UNUSED, UnitTable
from ext.recompute.units import LayerCosts
from ext.recompute.windows import BEFORE_BACKWARD, ON_DEMAND, WAIT

NUM_BUDGETS = 12
"""For which the tables of a stage are made."""


@dataclass(frozen=True)
class StageChoices:
    """The choices of one stage.

    Attributes:
        tables: by choice, from keeping everything on.
        model: what each of them costs.
    """

    tables: tuple[StageTables, ...]
    model: StageModel


def stage_choices(
    profile: PipelineProfile,
    stage: int,
    units: Sequence[LayerCosts | None],
    in_flight: int,
    *,
    overlap: bool = True,
) -> StageChoices:
    """Tables for budgets between the least that the stage can hold and all that it computes.

    Args:
        profile: of the pipeline.
        stage: its index.
        units: costs of its layers' units; None for a layer that is kept.
        in_flight: micro-batches among which the budgets are shared, about as many as the stage will hold.
        overlap: whether recomputation may run ahead of the backward, and under all-reduces.
    """
    # Reading a configuration must not import scipy.
    from ext.recompute.heu import solve_heu

    decided = tuple(_for_any_order(costs, overlap) if costs and worth_deciding(costs) else None for costs in units)
    found = list(_tables(decided, in_flight, solve_heu))
    if overlap:
        found = [_left_to_r(tables) for tables in found]
    return _choices(profile, stage, found)


def more_choices(
    profile: PipelineProfile, stage: int, choices: StageChoices, more: Iterable[StageTables]
) -> StageChoices:
    """The choices of a stage and others, still in the order of what a forward leaves behind."""
    return _choices(profile, stage, [*choices.tables, *(tables for tables in more if tables not in choices.tables)])


def _choices(profile: PipelineProfile, stage: int, found: Iterable[StageTables]) -> StageChoices:
    costs = [(tables, _costs(profile.stages[stage], tables)) for tables in found]
    costs.sort(key=lambda entry: -entry[1].kept)
    return StageChoices(
        tuple(tables for tables, _ in costs),
        StageModel(
            tuple(costs for _, costs in costs),
            profile.fixed(stage),
            tuple(tables.num_recomputing for tables, _ in costs),
        ),
    )


def _costs(stage: Stage, tables: StageTables) -> StageCosts:
    """The stage's costs, in which R brings back no more than it does: nothing where all runs on demand."""
    costs = table_costs(stage, tables)
    if not costs.recompute or any(tables.recomputed(*BEFORE_BACKWARD)):
        return costs
    return replace(
        costs,
        recompute=0.0,
        input_grad=costs.input_grad + costs.recompute,
        activations=costs.activations - costs.dropped + costs.working_set,
        dropped=costs.working_set,
    )


def _for_any_order(costs: LayerCosts, overlap: bool) -> LayerCosts:
    """The layer without what depends on the order: which forward comes before which backward."""
    if costs.all_reduces is None or not overlap:
        return replace(costs, all_reduces=None)
    return replace(costs, all_reduces=replace(costs.all_reduces, first_forward=0.0, second_forward=0.0))


def _tables(decided: tuple[LayerCosts | None, ...], in_flight: int, solve: Solve) -> Iterator[StageTables]:
    """Different tables, the one that keeps everything first; each keeps less than the one before."""
    most = in_flight * sum(costs.activation_bytes for costs in decided if costs is not None)
    layers = StageLayers(decided, in_flight, most)
    found = solve_stage(layers, solve)
    yield found
    if not found.parts:
        return
    least = _least(layers, solve)
    for number in range(1, NUM_BUDGETS + 1):
        budget = most - (most - least) * number // NUM_BUDGETS
        tables = solve_stage(replace(layers, budget=budget), solve)
        if tables.kept_bytes < found.kept_bytes:
            yield tables
            found = tables


def _least(layers: StageLayers, solve: Solve) -> int:
    """Bytes of the smallest budget for which there are tables."""
    try:
        return solve_stage(replace(layers, budget=0), solve).bytes
    except InfeasibleBudget as error:
        return error.smallest_budget


def _left_to_r(tables: StageTables) -> StageTables:
    """The tables with every unit that an R can bring back in P in the place of C."""
    parts = tuple(
        replace(part, solution=replace(part.solution, tables=tuple(_early(part, t) for t in part.solution.tables)))
        for part in tables.parts
    )
    return StageTables.of_parts(len(tables.tables), parts)


def _early(part: Part, table: UnitTable) -> UnitTable:
    """Units on demand go to P but for collectives, and for what reads something that comes back later."""
    decisions = dict(table.decisions)
    for unit in part.problem.layer.units:
        in_time = all(decisions[name] in (KEEP, UNUSED, *BEFORE_BACKWARD) for name in unit.inputs)
        if decisions[unit.name] == ON_DEMAND and in_time and not unit.communication:
            decisions[unit.name] = WAIT
    return UnitTable.of(decisions)


def tables_of_plan(
    schedule: Schedule,
    plan: Plan,
    stages: Sequence[StageTables],
    profile: PipelineProfile,
    budgets: Sequence[int],
    step_time: float,
) -> PipelineTables:
    """The tables that a search chose, with the plan that it found for them.

    Args:
        schedule: that the plan goes by.
        plan: with every R.
        stages: tables by stage.
        profile: of the pipeline.
        budgets: bytes that each stage's rank may hold.
        step_time: simulated seconds.
    """
    found = PipelineTables.of(schedule, _without_idle_r(plan, stages), stages, profile, budgets)
    exposed = tuple(_exposing(tables, 1 - share) for tables, share in zip(stages, found.early, strict=True))
    return replace(found, stages=exposed, step_time=step_time)


def _without_idle_r(plan: Plan, stages: Sequence[StageTables]) -> Plan:
    """The plan without R on stages whose tables leave nothing to it."""
    idle = {s for s, tables in enumerate(stages) if not any(tables.recomputed(*BEFORE_BACKWARD))}
    if not any(stage in idle for stage, _ in plan.early_recomputes):
        return plan
    return plan_of_orders(
        plan.schedule,
        [
            [action for action in plan.compute_order(rank) if action.kind is not R or action.stage not in idle]
            for rank in range(plan.num_ranks)
        ],
        rank_of=plan.rank_of,
        num_microbatches=plan.num_microbatches,
        layers_per_stage=plan.layers_per_stage,
        recomputed_layers=plan.recomputed_layers,
    )


def _exposing(tables: StageTables, share: float) -> StageTables:
    """The tables where a share of the micro-batches has no R."""
    parts = []
    for part in tables.parts:
        alone = StageTables(part.solution.tables, (part,))
        exposed = seconds(alone.recomputed(ON_DEMAND)) + share * seconds(alone.recomputed(WAIT))
        parts.append(replace(part, solution=replace(part.solution, exposed=exposed)))
    return replace(tables, parts=tuple(parts))


def keeps_budgets(tables: PipelineTables, profile: PipelineProfile, budgets: Sequence[int]) -> bool:
    """Whether every stage keeps its budget, counted as for the table of memory."""
    plan = tables.plan
    return all(
        round(peak(heaviest_loads(plan.orders[plan.rank_of[s]]), costs)) + profile.fixed(s) <= budgets[s]
        for s, costs in enumerate(tables.costs)
    )
