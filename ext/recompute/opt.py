"""OPT: tables that may differ from layer to layer, with the least recomputation in the critical path of a stage.

Takes the best of HEU, of a mixture of configurations found by column generation, and of the whole integer program,
each checked by the same evaluation, and reports the best bound with it.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from ext.recompute.columns import ColumnSearch, Kind
from ext.recompute.heu import solve_heu
from ext.recompute.milp import NONE, Program, add_layer, picked, window_terms
from ext.recompute.problem import Solution, StageProblem, evaluate
from ext.recompute.table import UnitTable

DEFAULT_TIME_LIMIT = 10.0
RELATIVE_GAP = 5e-3
_COLUMN_SHARE = 0.6
_SCALE = 1e6


def solve_opt(
    problem: StageProblem, *, time_limit: float = DEFAULT_TIME_LIMIT, relative_gap: float = RELATIVE_GAP
) -> Solution:
    """The best tables found within ``time_limit`` seconds, a table for each layer.

    Raises:
        InfeasibleBudget: no tables fit; says what would.
    """
    start = time.perf_counter()
    best = replace(solve_heu(problem), bound=0.0)
    bound = 0.0
    if best.exposed > 0:
        search = ColumnSearch(problem, start + _COLUMN_SHARE * time_limit, relative_gap)
        search.cost = best.exposed
        search.run()
        bound = search.bound
        if search.best is not None:
            best = _better(problem, best, search.best, "columns")
    left = start + time_limit - time.perf_counter()
    if best.exposed * (1 - relative_gap) > bound and left > 0.1:
        tables, other_bound = solve_whole_program(problem, left, relative_gap)
        bound = max(bound, other_bound)
        if tables is not None:
            best = _better(problem, best, tables, "milp")
    return replace(best, bound=min(bound, best.exposed), seconds=time.perf_counter() - start)


def solve_whole_program(
    problem: StageProblem, time_limit: float, relative_gap: float
) -> tuple[tuple[UnitTable, ...] | None, float]:
    """One integer program over all layers of the stage: the tables it finds and its bound."""
    layers = problem.num_layers
    kinds = [Kind(problem, 1, last=number == layers - 1) for number in range(layers)]
    program = Program()
    blocks = [add_layer(program, kind.problem, kind.options, _SCALE) for kind in kinds]
    for window in problem.windows:
        terms = [window_terms(k.options, v, window.name, _SCALE) for k, v in zip(kinds, blocks, strict=True)]
        if window.stage_wide:
            program.row([t for part in terms for t in part], -np.inf, layers * window.capacity * _SCALE)
        else:
            for part in terms:
                program.row(part, -np.inf, window.capacity * _SCALE)
    room = max(1, problem.budget - problem.input_bytes)
    resident, transient = [], []
    for kind, block in zip(kinds, blocks, strict=True):
        pairs = [
            (v, option)
            for group, own in zip(kind.options, block, strict=True)
            for option, v in zip(group, own, strict=True)
            if v != NONE
        ]
        resident += [(v, option.resident / room) for v, option in pairs if option.resident]
        transient.append([(v, option.transient / room) for v, option in pairs if option.transient])
    reserve = program.variable(0.0, integral=False)
    program.row([*resident, (reserve, 1.0)], -np.inf, 1.0)
    for part in transient:
        program.row([*part, (reserve, -1.0)], -np.inf, 0.0)
    result = program.solve(time_limit, relative_gap)
    bound = result.get("mip_dual_bound")
    bound = max(0.0, bound / _SCALE) if bound is not None and np.isfinite(bound) else 0.0
    if result.x is None:
        return None, bound
    names = [unit.name for unit in problem.layer.units]
    tables = tuple(
        UnitTable.of(dict(zip(names, (o.decision for o in picked(kind.options, block, result.x)), strict=True)))
        for kind, block in zip(kinds, blocks, strict=True)
    )
    return tables, bound


def _better(problem: StageProblem, best: Solution, tables: tuple[UnitTable, ...], method: str) -> Solution:
    exposed, size = evaluate(problem, tables)
    if size <= problem.budget and exposed < best.exposed:
        return replace(best, tables=tables, exposed=exposed, bytes=size, method=method, fell_back=False)
    return best
