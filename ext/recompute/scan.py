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

from ext.recompute.problem import Option, StageProblem
from ext.recompute.reduce import consumers
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.windows import ON_DEMAND, Window

MAX_CANDIDATES = 13
_ROUNDING = 1e-12


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


def candidates(problem: StageProblem, options: Sequence[Sequence[Option]]) -> list[int]:
    """Units about which a set decides: those that can be kept or dropped."""
    return [i for i, group in enumerate(options) if len(group) > 1 and any(option.decision == KEEP for option in group)]


def can_scan(problem: StageProblem, options: Sequence[Sequence[Option]]) -> bool:
    """Whether the sets are few enough; regions are left to the integer program."""
    return len(candidates(problem, options)) <= MAX_CANDIDATES and not any(u.region for u in problem.layer.units)


def scan(
    problem: StageProblem,
    options: Sequence[Sequence[Option]],
    relative_gap: float = 0.0,
    node_limit: int = 4_000,
) -> ScanResult:
    """The choice with the least exposed time among all that fit.

    Args:
        problem: see `StageProblem`.
        options: of each unit, as `reduced_options` gives them.
        relative_gap: the search may stop when the best found is this share above the bound, or less.
        node_limit: placements that are tried before the search is cut short.
    """
    sets = _Sets(problem, options)
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
        packing = _Packing(sets, int(k), room, cost * (1 - relative_gap), nodes)
        packing.search()
        nodes -= packing.nodes
        if packing.best is not None:
            best, cost = packing.best, packing.cost
        if nodes <= 0:
            return ScanResult(best, cost, min(float(bounds[k]), cost * (1 - relative_gap)), smallest, False)
    return ScanResult(best, cost, cost * (1 - relative_gap), smallest, True)


class _Sets:
    """All sets of kept units, one per row; columns are units."""

    def __init__(self, problem: StageProblem, options: Sequence[Sequence[Option]]) -> None:
        self.problem, self.options = problem, options
        units = problem.layer.units
        self.decide = [{option.decision: option for option in group} for group in options]
        self.time = np.array([unit.time for unit in units])
        self.inputs = [[problem.index[name] for name in unit.inputs] for unit in units]
        # Without a stage-wide window, or with one layer, every recompute holds its bytes once.
        self.on_demand_bytes = np.array([float(unit.bytes) for unit in units])
        self.extra_bytes = (problem.num_layers - 1) * self.on_demand_bytes
        self.kept, self.recomputed = self._enumerate()
        keep_bytes = np.array(
            [group[KEEP].bytes_for(problem.num_layers) if KEEP in group else 0 for group in self.decide], dtype=float
        )
        self.least_bytes = self.kept @ keep_bytes + self.recomputed @ self.on_demand_bytes

    def _enumerate(self) -> tuple[np.ndarray, np.ndarray]:
        problem, units, readers = self.problem, self.problem.layer.units, consumers(self.problem)
        free = candidates(problem, self.options)
        rows = 2 ** len(free)
        kept = np.zeros((rows, len(units)), dtype=bool)
        kept[:, free] = (np.arange(rows)[:, None] >> np.arange(len(free))) & 1
        for i, group in enumerate(self.options):
            if len(group) == 1 and group[0].decision == KEEP:
                kept[:, i] = True
        possible = np.ones(rows, dtype=bool)
        for i, unit in enumerate(units):
            if unit.view_of:
                possible &= ~kept[:, i] | kept[:, problem.index[unit.view_of]]
        recomputed = np.zeros_like(kept)
        for i in reversed(range(len(units))):
            wanted = np.full(rows, units[i].needed)
            for j in readers[i]:
                wanted |= recomputed[:, j]
            recomputed[:, i] = wanted & ~kept[:, i]
        for i, group in enumerate(self.decide):
            if ON_DEMAND not in group:
                possible &= ~recomputed[:, i]
        return kept[possible], recomputed[possible]

    def only(self, rows: np.ndarray) -> _Sets:
        """The same with these rows alone."""
        self.kept, self.recomputed, self.least_bytes = self.kept[rows], self.recomputed[rows], self.least_bytes[rows]
        return self

    def recompute_time(self) -> np.ndarray:
        return self.recomputed @ self.time

    def bounds(self, room: int) -> np.ndarray:
        """A lower bound of each set's exposed time: windows as one divisible pool, for all units and per half."""
        windows = self.problem.windows
        slack = room - self.least_bytes
        free = self._can_be_hidden(slack)
        forced = (self.recomputed & ~free) @ self.time
        halves = sorted({unit.half for unit in self.problem.layer.units})
        bound = self._spilled(free @ self.time, windows)
        for half in halves:
            of_half = np.array([unit.half == half for unit in self.problem.layer.units])
            admitted = [window for window in windows if window.admits(half)]
            bound = np.maximum(bound, self._spilled((free & of_half) @ self.time, admitted))
        bound = np.maximum(bound, self._spilled_by_memory(free, slack))
        return forced + bound

    def _can_be_hidden(self, slack: np.ndarray) -> np.ndarray:
        """Recomputed units that at least one window could take, were it empty, with their inputs before them."""
        windows = sorted(self.problem.windows, key=lambda window: window.position)
        late = np.iinfo(np.int64).max
        earliest = np.full(self.recomputed.shape, -1, dtype=np.int64)
        for i in range(len(self.inputs)):
            ready = np.full(len(slack), -1, dtype=np.int64)
            for j in self.inputs[i]:
                ready = np.maximum(ready, earliest[:, j])
            own = np.full(len(slack), late)
            for window in reversed(windows):
                if window.name in self.decide[i]:
                    possible = ready <= window.position
                    if window.stage_wide:
                        possible &= self.extra_bytes[i] <= slack
                    own = np.where(possible, window.position, own)
            earliest[:, i] = np.where(self.recomputed[:, i], own, -1)
        return self.recomputed & (earliest < late)

    def _spilled(self, time: np.ndarray, windows: Sequence[Window]) -> np.ndarray:
        """Cost of ``time`` that fills the windows, cheapest first, and runs on demand beyond."""
        share = self.problem.exposed_share
        rest, cost = time, np.zeros_like(time)
        for window in sorted(windows, key=share):
            used = np.minimum(rest, window.capacity / window.slowdown)
            cost = cost + share(window) * used
            rest = rest - used
        return cost + rest

    def _spilled_by_memory(self, free: np.ndarray, slack: np.ndarray) -> np.ndarray:
        """The same where memory limits what stage-wide windows take: units by time per byte, divisible."""
        hidden = np.zeros_like(slack)
        left = slack.copy()
        order = np.argsort(-self.time / np.maximum(self.extra_bytes, 1.0))
        for i in order:
            wanted = free[:, i] * self.extra_bytes[i]
            share = np.where(wanted > left, left / np.maximum(wanted, 1.0), 1.0)
            hidden += share * free[:, i] * self.time[i]
            left -= share * wanted
        other = sum(w.capacity / w.slowdown for w in self.problem.windows if not w.stage_wide)
        return np.maximum(0.0, free @ self.time - hidden - other)


class _Packing:
    """Depth-first placement of one set's recomputed units into windows, in forward order."""

    def __init__(self, sets: _Sets, row: int, room: int, limit: float, max_nodes: int) -> None:
        problem = sets.problem
        self.sets, self.row = sets, row
        self.units = [int(i) for i in np.flatnonzero(sets.recomputed[row])]
        self.cost, self.best = limit, None
        self.nodes, self.max_nodes = 0, max_nodes
        self.slack = room - float(sets.least_bytes[row])
        self.left = {w.name: w.capacity * (1 + _ROUNDING) for w in problem.windows}
        self.stage_wide = {w.name: w.stage_wide for w in problem.windows}
        self.stage_wide[ON_DEMAND] = False
        self.chosen: list[Option | None] = [None] * len(problem.layer.units)
        # By cost, then by time: a unit placed early leaves its readers most freedom.
        self.choices = [
            sorted((o for o in sets.options[i] if o.recomputes), key=lambda o: (o.cost, o.position)) for i in self.units
        ]
        self.times = [float(sets.time[i]) for i in self.units]
        # From each unit on: the time still to be placed, most time per byte, and windows that admit any of it,
        # cheapest first.
        self.rest = [0.0] * (len(self.units) + 1)
        self.ratio = [0.0] * (len(self.units) + 1)
        self.open: list[list[tuple[str, float, float, bool]]] = [[] for _ in range(len(self.units) + 1)]
        windows = sorted(problem.windows, key=problem.exposed_share)
        halves: set[str] = set()
        for k in reversed(range(len(self.units))):
            self.rest[k] = self.rest[k + 1] + self.times[k]
            extra = float(sets.extra_bytes[self.units[k]])
            self.ratio[k] = max(self.ratio[k + 1], self.times[k] / extra if extra else float("inf"))
            halves.add(problem.layer.units[self.units[k]].half)
            self.open[k] = [
                (w.name, problem.exposed_share(w), w.slowdown, w.stage_wide)
                for w in windows
                if any(w.admits(h) for h in halves)
            ]

    def search(self) -> None:
        self._place(0, 0.0)

    def _least(self, k: int) -> float:
        """A lower bound of the cost of unit ``k`` and those after it: windows and memory as divisible pools."""
        rest, cost = self.rest[k], 0.0
        stage_wide_left = self.slack * self.ratio[k] if self.ratio[k] < float("inf") else float("inf")
        for name, share, slowdown, stage_wide in self.open[k]:
            capacity = self.left[name] / slowdown
            if stage_wide:
                capacity = min(capacity, stage_wide_left)
                stage_wide_left -= capacity
            if rest <= capacity:
                return cost + share * rest
            cost += share * capacity
            rest -= capacity
        return cost + rest

    def _place(self, k: int, cost: float) -> None:
        """Places unit ``k`` and those after it."""
        if cost + self._least(k) >= self.cost:
            return
        if k == len(self.units):
            self.cost, self.best = cost, self._complete()
            return
        i = self.units[k]
        inputs = [option for j in self.sets.inputs[i] if (option := self.chosen[j]) is not None]
        for option in self.choices[k]:
            if self.nodes >= self.max_nodes or not all(value.serves(option) for value in inputs):
                continue
            self.nodes += 1
            name = option.decision
            extra = float(self.sets.extra_bytes[i]) if self.stage_wide[name] else 0.0
            if extra > self.slack or (name != ON_DEMAND and option.time > self.left[name]):
                continue
            if name != ON_DEMAND:
                self.left[name] -= option.time
            self.slack -= extra
            self.chosen[i] = option
            self._place(k + 1, cost + option.cost)
            self.chosen[i] = None
            self.slack += extra
            if name != ON_DEMAND:
                self.left[name] += option.time

    def _complete(self) -> list[Option]:
        kept = self.sets.kept[self.row]
        return [
            placed if placed is not None else group[KEEP if kept[i] else UNUSED]
            for i, (placed, group) in enumerate(zip(self.chosen, self.sets.decide, strict=True))
        ]
