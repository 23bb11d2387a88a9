"""The costs that unit tables were made for, in a plan's file, so that a later run needs no profile. No torch.

The tables themselves are a part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ext.core.errors import ConfigError, nearest
from ext.pipeline.plan import Plan, UnitDecisions
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import Stage
from ext.recompute.pipeline_tables import PipelineTables, early_shares
from ext.recompute.problem import Solution, StageProblem
from ext.recompute.profile_file import layer_costs
from ext.recompute.stage_costs import table_costs
from ext.recompute.stage_tables import Part, StageTables
from ext.recompute.table import KEEP, UNUSED, UnitTable
from ext.recompute.windows import BEFORE_BACKWARD, IN_BACKWARD, Window

KEY = "units"
_DECISIONS = (KEEP, UNUSED, *BEFORE_BACKWARD, *IN_BACKWARD)
_NUMBERS = ("exposed", "bytes", "method", "bound", "seconds", "fell_back")


def tables_json(tables: PipelineTables) -> dict[str, Any]:
    """The costs behind the tables, by stage and kind of layer; ``layers`` are positions within the stage."""
    return {
        "reserve_bytes": list(tables.reserves),
        "stages": [[_part_json(part) for part in stage.parts] for stage in tables.stages],
    }


def _part_json(part: Part) -> dict[str, Any]:
    problem = part.problem
    return {
        "layers": list(part.positions),
        "in_flight": problem.in_flight,
        "budget_bytes": problem.budget,
        "windows": [{**asdict(window), "halves": sorted(window.halves)} for window in problem.windows],
        "costs": asdict(problem.layer),
        **{name: getattr(part.solution, name) for name in _NUMBERS},
    }


def read_tables(
    content: Mapping[str, Any], plan: Plan, schedule: Schedule, stages: Sequence[Stage] | None
) -> PipelineTables:
    """The tables of a plan's file, ready to be run.

    Args:
        content: of the file.
        plan: that it holds.
        schedule: that runs it.
        stages: of this run, where they are profiled.

    Raises:
        ConfigError: the costs are missing or damaged, or a table decides about what they do not know.
    """
    try:
        found = content[KEY]
        reserves = tuple(int(reserve) for reserve in found["reserve_bytes"])
        parts_of = [
            [_part(part, tables) for part in parts]
            for parts, tables in zip(found["stages"], plan.unit_tables, strict=True)
        ]
        if len(reserves) != plan.num_stages:
            raise ValueError(f"{len(reserves)} reserves for {plan.num_stages} stages")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{KEY}: no costs can be read for the unit tables: {type(error).__name__}: {error}. Make the plan again."
        ) from error
    problems = [problem for stage, parts in enumerate(parts_of) for problem in _strangers(stage, parts, plan)]
    if problems:
        raise ConfigError(*problems)
    tables = [
        StageTables(tuple(map(UnitTable, of_stage)), tuple(parts))
        for of_stage, parts in zip(plan.unit_tables, parts_of, strict=True)
    ]
    return PipelineTables(
        schedule=schedule,
        plan=plan,
        stages=tuple(tables),
        costs=tuple(map(table_costs, stages, tables)) if stages is not None else (),
        early=early_shares(plan),
        step_time=0.0,
        reserves=reserves,
    )


def _part(content: Mapping[str, Any], tables: Sequence[UnitDecisions]) -> Part:
    positions = tuple(int(position) for position in content["layers"])
    if any(position < 0 for position in positions):
        raise ValueError(f"layers are {positions}")
    problem = StageProblem(
        layer_costs(content["costs"]),
        len(positions),
        int(content["in_flight"]),
        int(content["budget_bytes"]),
        tuple(Window(**{**window, "halves": frozenset(window["halves"])}) for window in content["windows"]),
    )
    numbers = {name: content[name] for name in _NUMBERS}
    return Part(positions, problem, Solution(tuple(UnitTable(tables[position]) for position in positions), **numbers))


def _strangers(stage: int, parts: Sequence[Part], plan: Plan) -> Iterator[str]:
    """Units and decisions that there are none of."""
    units = {position: part.problem.index for part in parts for position in part.positions}
    for position, decisions in enumerate(plan.unit_tables[stage]):
        known = units.get(position, {})
        for name, decision in decisions:
            where = f"unit_tables: stage {stage}, layer {position}"
            if name not in known:
                yield f"{where}: unknown unit '{name}'.{nearest(name, known)} Its units: {', '.join(known) or 'none'}."
            if decision not in _DECISIONS:
                yield f"{where}: '{name}' is to be {decision!r}. Allowed: {', '.join(_DECISIONS)}."
