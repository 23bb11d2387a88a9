"""Exact search for one table: every set of kept units gets a bound at once, the promising ones are packed into windows.

A transformer layer has ten to twelve units worth keeping, so there are a few thousand sets. What a set recomputes, the
memory of that and a bound on the exposed time are array operations over all sets. Sets are then visited in the order
of their bounds; for each, a depth-first search places the recomputed units into windows. The search ends when no bound
is left below the best found. It replaces the integer program where the sets are few enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ext.recompute.packing import Packing
from ext.recompute.problem import Option, StageProblem
from ext.recompute.sets import Sets, candidates

MAX_CANDIDATES = 13


@dataclass(frozen=True)
class ScanResult:
    """What a scan found.

    Attributes:
        chosen: the best option of each unit; None if no set fits the memory.
        cost: exposed seconds of one layer; infinite without a choice.
        bound: no choice costs less.
        smallest_bytes: of the options, the least that any choice needs.
        complete: the search was not cut short.
    """

    chosen: list[Option] | None
    cost: float
    bound: float
    smallest_bytes: int
    complete: bool


def can_scan(problem: StageProblem, options: Sequence[Sequence[Option]]) -> bool:
    """Whether the sets are few enough; regions are left to the integer program."""
    return len(candidates(problem, options)) <= MAX_CANDIDATES and not any(u.region for u in problem.layer.units)


def scan(
    problem: StageProblem,
    options: Sequence[Sequence[Option]],
    relative_gap: float = 0.0,
    node_limit: int = 6_000,
) -> ScanResult:
    """The choice with the least exposed time among all that fit.

    Args:
        problem: see `StageProblem`.
        options: of each unit, as `reduced_options` gives them.
        relative_gap: the search may stop when the best found is this share above the bound, or less.
        node_limit: placements that are tried before the search is cut short.
    """
    sets = Sets(problem, options)
    smallest = int(sets.least_bytes.min())
    room = problem.budget - problem.input_bytes
    fitting = np.flatnonzero(sets.least_bytes <= room)
    if not len(fitting):
        return ScanResult(None, float("inf"), float("inf"), smallest, True)
    sets = sets.only(fitting)
    bounds = sets.bounds(room)
    # Of equal bounds, the set that recomputes least comes first.
    order = np.lexsort((sets.recompute_time(), bounds))
    best: list[Option] | None = None
    cost = float("inf")
    nodes = node_limit
    for k in order:
        if bounds[k] >= cost * (1 - relative_gap):
            break
        packing = Packing(sets, int(k), room, cost * (1 - relative_gap), nodes)
        packing.search()
        nodes -= packing.nodes
        if packing.best is not None:
            best, cost = packing.best, packing.cost
        if nodes <= 0:
            return ScanResult(best, cost, min(float(bounds[k]), cost * (1 - relative_gap)), smallest, False)
    return ScanResult(best, cost, cost * (1 - relative_gap), smallest, True)
