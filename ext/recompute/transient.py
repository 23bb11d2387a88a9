"""Bytes that recomputes hold while the backward goes through a layer, counted as the unit engine frees them. No torch.

Solvers add up all that one layer brings back, as if the backward met all of it at once. It does not: it is done with
the MLP before it asks for the attention's values, and attention scores are gone once the probabilities are there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from ext.recompute.problem import InfeasibleBudget, Solution, StageProblem
from ext.recompute.table import KEEP, UNUSED, UnitTable
from ext.recompute.units import LayerCosts, UnitCosts
from ext.recompute.windows import BEFORE_BACKWARD, ON_DEMAND

_STEPS = 6
"""Halvings of the interval in which the larger budget lies."""


def transient_bytes(layer: LayerCosts, table: UnitTable, windows: Container[str] | None = None) -> int:
    """The most that one layer's recomputes hold at once, from the backward's arrival until it has left.

    Values that come back before the backward gets there, under all-reduces, count throughout; those of `ON_DEMAND`
    from the moment that the backward or another recompute first asks for them.

    Args:
        layer: costs of its units.
        table: what is recomputed, and where.
        windows: whose values count; all but those that come back ahead of the backward where None.
    """
    back = _Backward(layer)
    there = 0
    for unit in layer.units:
        decision = table[unit.name]
        counts = decision not in BEFORE_BACKWARD if windows is None else decision in windows
        if decision in (KEEP, UNUSED) or not counts:
            continue
        if decision == ON_DEMAND:
            back.missing.add(unit.name)
        else:
            there += unit.bytes
    return there + back.peak()


class _Backward:
    """A backward through one layer, as `ext.recompute.unit_run.LayerRun` meets it.

    Attributes:
        missing: units whose values are to be brought back.
    """

    def __init__(self, layer: LayerCosts) -> None:
        self._units = {unit.name: unit for unit in layer.units}
        self.missing: set[str] = set()
        self._live: set[str] = set()
        self._most = 0

    def peak(self) -> int:
        """The most bytes at once."""
        for unit in reversed(self._units.values()):
            asked = [name for name in (unit.name, *unit.inputs) if self._units[name].needed]
            for last in asked:  # whichever comes last finds the others there
                before = set(self.missing), set(self._live)
                for name in (*(n for n in asked if n != last), last):
                    self._bring_back(name)
                if last != asked[-1]:
                    self.missing, self._live = before
            self._live.discard(unit.name)
        return self._most

    def _bring_back(self, name: str) -> None:
        if name not in self.missing:
            return
        unit = self._units[name]
        for needed in unit.inputs:
            self._bring_back(needed)
        self.missing.discard(name)
        self._live.add(name)
        self._most = max(self._most, sum(self._units[n].bytes for n in self._live))
        for needed in unit.inputs:
            if needed in self._live and not self._units[needed].needed and not self._readers(needed):
                self._live.discard(needed)

    def _readers(self, name: str) -> list[UnitCosts]:
        """That are still to be recomputed from this unit."""
        return [self._units[n] for n in self.missing if name in self._units[n].inputs]


def held_bytes(problem: StageProblem, tables: Iterable[UnitTable]) -> int:
    """That a stage holds at most under these tables."""
    resident, transient = 0, 0
    for table in tables:
        resident += sum(option.resident for option in problem.choice(table))
        transient = max(transient, transient_bytes(problem.layer, table))
    return problem.input_bytes + resident + transient


def solve_tightly(problem: StageProblem, solve: Callable[[StageProblem], Solution]) -> Solution:
    """``solve`` with memory counted by `held_bytes`.

    The search is made as if values that no backward reads took no place, and with a larger budget: the largest for
    which HEU still finds a table that keeps the real one. Where that gives nothing better, it is ``solve(problem)``.

    Args:
        problem: the stage.
        solve: finds tables, or raises `InfeasibleBudget`.

    Returns:
        The tables; their ``bound`` holds for the budget with which they were found.

    Raises:
        InfeasibleBudget: says what would do.
    """
    # Reading a configuration must not import scipy.
    from ext.recompute.heu import solve_heu

    best, at = _plain_or_least(problem, solve_heu)
    if best.exposed > 0:
        low, high = 0, sum(unit.bytes for unit in problem.layer.units)
        for _ in range(_STEPS):
            more = (low + high) // 2
            loose = replace(problem, budget=problem.budget + more, temporaries_are_free=True)
            found = _within(problem, loose, solve_heu)
            low, high = (low, more) if found is None else (more, high)
            if found is not None and found.exposed < best.exposed:
                best, at = found, loose
    for wanted in (at, problem):
        found = _within(problem, wanted, solve)
        if found is not None:
            break
    if found is None or found.exposed > best.exposed:
        found = best
    return replace(found, bytes=held_bytes(problem, found.tables))


def _plain_or_least(problem: StageProblem, solve: Callable[[StageProblem], Solution]) -> tuple[Solution, StageProblem]:
    """``solve(problem)``, or else the tables with least memory, if they fit; and the problem that they are from."""
    try:
        return solve(problem), problem
    except InfeasibleBudget as error:
        smallest = error.smallest_budget
    loose = replace(problem, temporaries_are_free=True)
    try:
        solve(replace(loose, budget=0))
    except InfeasibleBudget as error:
        loose = replace(loose, budget=error.smallest_budget)
    found = solve(loose)
    held = held_bytes(problem, found.tables)
    if held > problem.budget:
        raise InfeasibleBudget(problem.budget, min(held, smallest))
    return found, loose


def _within(problem: StageProblem, loose: StageProblem, solve: Callable[[StageProblem], Solution]) -> Solution | None:
    """What ``solve`` finds for the loose problem, if that keeps the budget of the other one."""
    try:
        found = solve(loose)
    except InfeasibleBudget:
        return None
    return found if held_bytes(problem, found.tables) <= problem.budget else None
