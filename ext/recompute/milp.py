"""One layer's choice of options as a mixed-integer linear program, solved by scipy's HiGHS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult, milp
from scipy.sparse import csr_array

from ext.recompute.problem import Option, StageProblem
from ext.recompute.table import KEEP, UNUSED

NONE = -1
"""Stands where an option has no variable."""


@dataclass
class Program:
    """Variables, rows and their coefficients; rows are lower <= sum of value * variable <= upper."""

    costs: list[float] = field(default_factory=list)
    upper_bounds: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def variable(self, cost: float, upper: float = 1.0, integral: bool = True) -> int:
        self.costs.append(cost)
        self.upper_bounds.append(upper)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.row_starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)

    @property
    def num_variables(self) -> int:
        return len(self.costs)

    @property
    def num_rows(self) -> int:
        return len(self.lower)

    def solve(self, time_limit: float, relative_gap: float = 0.0, relax: bool = False) -> OptimizeResult:
        """Minimises the costs; ``relax`` drops integrality."""
        shape = (self.num_rows, self.num_variables)
        matrix = csr_array((self.values, self.columns, self.row_starts), shape=shape)
        return solve(
            np.array(self.costs),
            constraints=(matrix, np.array(self.lower), np.array(self.upper)),
            bounds=(0, np.array(self.upper_bounds)),
            integrality=np.zeros(len(self.costs)) if relax else np.array(self.integral),
            time_limit=time_limit,
            relative_gap=relative_gap,
        )


def solve(costs: np.ndarray, *, time_limit: float, relative_gap: float, **problem: Any) -> OptimizeResult:
    """scipy's ``milp`` within limits, with nothing on standard output."""
    options = {"time_limit": max(time_limit, 1e-3), "mip_rel_gap": relative_gap}
    with _native_output_to_stderr():
        return milp(costs, options=options, **problem)


@contextmanager
def _native_output_to_stderr() -> Iterator[None]:
    """HiGHS writes a debugging line past Python to file descriptor 1 now and then, where JSON may be expected."""
    try:
        sys.stdout.flush()
        keep = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):  # standard output or error is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(keep, 1)
        os.close(keep)


def add_layer(
    program: Program,
    problem: StageProblem,
    options: Sequence[Sequence[Option]],
    cost_scale: float,
) -> list[list[int]]:
    """Adds one layer: a variable per option, one option per unit, inputs there in time, regions and views.

    A unit may do without a variable for `UNUSED`: it is unused where none of its variables is one.

    Returns:
        The variables, by unit and option; `NONE` for `UNUSED`.
    """
    units, index = problem.layer.units, problem.index
    variables = [
        [NONE if option.decision == UNUSED else program.variable(option.cost * cost_scale) for option in group]
        for group in options
    ]
    for group in variables:
        terms = [(v, 1.0) for v in group if v != NONE]
        if terms:
            program.row(terms, 1.0 if len(terms) == len(group) else 0.0, 1.0)
    for unit, group, own in zip(units, options, variables, strict=True):
        recomputed = [(option, v) for option, v in zip(group, own, strict=True) if option.recomputes]
        for name in unit.inputs:
            j = index[name]
            for reader, _ in recomputed:
                # Of the recomputes no later than the reader there is at most one, so the row holds for their sum.
                terms = [(v, 1.0) for option, v in recomputed if option.position <= reader.position]
                terms += [(v, -1.0) for o, v in zip(options[j], variables[j], strict=True) if o.serves(reader)]
                program.row(terms, -np.inf, 0.0)
        if unit.view_of:
            base = index[unit.view_of]
            terms = [(v, 1.0) for option, v in zip(group, own, strict=True) if option.decision == KEEP]
            terms += [(v, -1.0) for o, v in zip(options[base], variables[base], strict=True) if o.decision == KEEP]
            program.row(terms, -np.inf, 0.0)
    _add_regions(program, problem, options, variables)
    return variables


def _add_regions(
    program: Program, problem: StageProblem, options: Sequence[Sequence[Option]], variables: list[list[int]]
) -> None:
    first_of: dict[str, int] = {}
    for i, unit in enumerate(problem.layer.units):
        if not unit.region:
            continue
        first = first_of.setdefault(unit.region, i)
        if first == i:
            continue
        decisions = {o.decision for o in options[first]} | {o.decision for o in options[i]}
        for decision in sorted(decisions):
            terms = [
                (v, sign)
                for sign, k in ((1.0, first), (-1.0, i))
                for option, v in zip(options[k], variables[k], strict=True)
                if option.decision == decision and v != NONE
            ]
            if terms:
                program.row(terms, 0.0, 0.0)


def window_terms(
    options: Sequence[Sequence[Option]], variables: Sequence[Sequence[int]], window: str, scale: float
) -> list[tuple[int, float]]:
    """Time that each option takes of a window."""
    return [
        (v, option.time * scale)
        for group, own in zip(options, variables, strict=True)
        for option, v in zip(group, own, strict=True)
        if option.decision == window and option.time > 0
    ]


def picked(options: Sequence[Sequence[Option]], variables: Sequence[Sequence[int]], values: np.ndarray) -> list[Option]:
    """The option of each unit that an integral solution chooses."""
    chosen = []
    for group, own in zip(options, variables, strict=True):
        # Without a variable an option stands for "none of the others": it wins where these are all nearly zero.
        weights = [0.5 if v == NONE else values[v] for v in own]
        chosen.append(group[weights.index(max(weights))])
    return chosen
