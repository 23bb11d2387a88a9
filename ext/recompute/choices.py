"""What a search over orders may choose for a stage: tables from keeping everything to keeping least. No torch.

An order decides when an R action runs, so these tables leave to R whatever could also run on demand. A solver then
fills the waits of the order that was found (`ext.recompute.pipeline_tables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ext.pipeline.fit import ROUNDING
from ext.pipeline.memory import heaviest_loads, peak
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import PipelineProfile, StageModel
from ext.recompute.pipeline_tables import PipelineTables, early_shares, table_costs, with_tables
from ext.recompute.problem import InfeasibleBudget
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
    whole = profile.stages[stage].costs(0)
    found = list(_tables(decided, in_flight, solve_heu))
    if overlap:
        found = [_left_to_r(tables) for tables in found]
    return StageChoices(
        tuple(found),
        StageModel(
            tuple(table_costs(whole, tables) for tables in found),
            profile.fixed(stage),
            tuple(tables.num_recomputing for tables in found),
        ),
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
    return _of_parts(len(tables.tables), parts)


def _early(part: Part, table: UnitTable) -> UnitTable:
    """Units on demand go to P but for collectives, and for what reads something that comes back later."""
    decisions = dict(table.decisions)
    for unit in part.problem.layer.units:
        in_time = all(decisions[name] in (KEEP, UNUSED, *BEFORE_BACKWARD) for name in unit.inputs)
        if decisions[unit.name] == ON_DEMAND and in_time and not unit.communication:
            decisions[unit.name] = WAIT
    return UnitTable.of(decisions)


def _of_parts(num_layers: int, parts: Iterable[Part]) -> StageTables:
    tables = [UnitTable(())] * num_layers
    parts = tuple(parts)
    for part in parts:
        for position, table in zip(part.positions, part.solution.tables, strict=True):
            tables[position] = table
    return StageTables(tuple(tables), parts)


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
    early = early_shares(plan)
    costs = tuple(table_costs(profile.stages[s].costs(0), tables) for s, tables in enumerate(stages))
    reserves = []
    for s, stage in enumerate(costs):
        loads = heaviest_loads(plan.orders[plan.rank_of[s]])
        kept = max(load.kept for load in loads) * (stage.activations - stage.dropped + stage.stash)
        planned = max(load.recomputed for load in loads) * stage.dropped
        reserves.append(round(max(planned, budgets[s] - profile.fixed(s) - kept)))
    return PipelineTables(
        schedule=schedule,
        plan=with_tables(plan, stages),
        stages=tuple(_exposing(tables, 1 - share) for tables, share in zip(stages, early, strict=True)),
        costs=costs,
        early=early,
        step_time=step_time,
        reserves=tuple(reserves),
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
    """Whether every stage keeps its budget, as the simulator counts memory."""
    plan = tables.plan
    return all(
        peak(heaviest_loads(plan.orders[plan.rank_of[s]]), costs) + profile.fixed(s) <= budgets[s] * ROUNDING
        for s, costs in enumerate(tables.costs)
    )
