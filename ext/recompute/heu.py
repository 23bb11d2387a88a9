"""HEU: one table for all equal layers of a stage, with the least recomputation in the critical path.

Follows the published facts of Lynx (arXiv:2406.08756: one policy for identical layers, found in well under a second);
the integer program is our own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from ext.recompute.greedy import greedy
from ext.recompute.milp import NONE, Program, add_layer, picked, window_terms
from ext.recompute.problem import InfeasibleBudget, Option, Solution, StageProblem, evaluate, layer_cost
from ext.recompute.reduce import reduced_options
from ext.recompute.scan import can_scan, scan
from ext.recompute.table import UnitTable

DEFAULT_TIME_LIMIT = 1.0
RELATIVE_GAP = 0.0
_SCALE = 1e6
_MARGIN = 1 - 2e-6
"""Of the memory where HiGHS, which takes a row as kept when it is off by 1e-6, went over it."""


def solve_heu(
    problem: StageProblem, *, time_limit: float = DEFAULT_TIME_LIMIT, relative_gap: float = RELATIVE_GAP
) -> Solution:
    """The best single table for all layers of the stage.

    Few units are searched exactly over all sets of kept ones (`scan`); more, or a search that grows too long, go to
    the integer program; if that runs out of time, the best found so far stands in and ``fell_back`` is set.

    Args:
        problem: the stage.
        time_limit: seconds for the integer program.
        relative_gap: the search may stop this close to the bound.

    Raises:
        InfeasibleBudget: no table fits; says what would.
    """
    start = time.perf_counter()
    options = reduced_options(problem)
    best: list[Option] | None = None
    bound, method, complete = 0.0, "scan", False
    if can_scan(problem, options):
        result = scan(problem, options, relative_gap)
        if result.chosen is None and result.complete:
            raise InfeasibleBudget(problem.budget, problem.input_bytes + result.smallest_bytes)
        best, bound, complete = result.chosen, result.bound, result.complete
    if not complete:
        chosen, other_bound, complete = solve_program(problem, options, time_limit, relative_gap)
        bound = max(bound, other_bound)
        if chosen is not None and (best is None or layer_cost(chosen) < layer_cost(best)):
            best, method = chosen, "milp"
    if best is None and not complete:
        best, method = greedy(problem, options), "greedy"
    if best is None:
        raise InfeasibleBudget(problem.budget, smallest_budget(problem, options))
    if not complete and method != "greedy":
        other = greedy(problem, options)
        if other is not None and layer_cost(other) < layer_cost(best):
            best, method = other, "greedy"
    return _solution(problem, best, method, bound, time.perf_counter() - start, not complete)


def solve_program(
    problem: StageProblem,
    options: Sequence[Sequence[Option]],
    time_limit: float,
    relative_gap: float = 0.0,
) -> tuple[list[Option] | None, float, bool]:
    """The integer program of HEU.

    Returns:
        The chosen options (None if none was found), a lower bound of one layer's cost, and whether the search ended
        by itself.
    """
    chosen, bound, complete = None, 0.0, False
    for margin in (1.0, _MARGIN):
        program, variables = heu_program(problem, options, margin)
        result = program.solve(time_limit, relative_gap)
        complete = result.status in (0, 2)
        if result.x is None:
            return None, bound, complete
        if margin == 1.0:
            bound = max(0.0, _finite(result.get("mip_dual_bound")) / _SCALE)
        chosen = picked(options, variables, result.x)
        size = sum(option.bytes_for(problem.num_layers) for option in chosen)
        if size <= problem.budget - problem.input_bytes:
            break
    return chosen, bound, complete


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def heu_program(
    problem: StageProblem, options: Sequence[Sequence[Option]], memory_margin: float = 1.0
) -> tuple[Program, list[list[int]]]:
    """Least exposed time of one layer, subject to order, windows and memory; also the variables by unit and option."""
    program = Program()
    variables = add_layer(program, problem, options, _SCALE)
    for window in problem.windows:
        terms = window_terms(options, variables, window.name, _SCALE)
        if terms:
            program.row(terms, -np.inf, window.capacity * _SCALE)
    room = problem.budget - problem.input_bytes
    unit = max(1, abs(room))
    program.row(
        [(v, size / unit) for v, size in _sizes(problem, options, variables)],
        -np.inf,
        (memory_margin if room > 0 else 1.0) * room / unit,
    )
    return program, variables


def smallest_budget(problem: StageProblem, options: Sequence[Sequence[Option]]) -> int:
    """Bytes of the smallest budget that some table fits."""
    program = Program()
    variables = add_layer(program, problem, options, 0.0)
    sizes = _sizes(problem, options, variables)
    unit = max((size for _, size in sizes), default=1)
    for v, size in sizes:
        program.costs[v] = size / unit
    for window in problem.windows:
        terms = window_terms(options, variables, window.name, _SCALE)
        if terms:
            program.row(terms, -np.inf, window.capacity * _SCALE)
    chosen = picked(options, variables, program.solve(time_limit=30.0).x)
    return problem.input_bytes + sum(option.bytes_for(problem.num_layers) for option in chosen)


def _sizes(
    problem: StageProblem, options: Sequence[Sequence[Option]], variables: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    return [
        (v, option.bytes_for(problem.num_layers))
        for group, own in zip(options, variables, strict=True)
        for option, v in zip(group, own, strict=True)
        if v != NONE and option.bytes_for(problem.num_layers) > 0
    ]


def _solution(
    problem: StageProblem, chosen: Sequence[Option], method: str, bound: float, seconds: float, fell_back: bool
) -> Solution:
    names = [unit.name for unit in problem.layer.units]
    table = UnitTable.of({name: option.decision for name, option in zip(names, chosen, strict=True)})
    tables = (table,) * problem.num_layers
    exposed, size = evaluate(problem, tables)
    return Solution(tables, exposed, size, method, bound * problem.num_layers, seconds, fell_back)
