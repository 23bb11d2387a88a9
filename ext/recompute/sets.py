"""Every set of kept units at once, as arrays: what it recomputes, the memory of that, a bound on what is exposed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ext.recompute.problem import Option, StageProblem
from ext.recompute.reduce import consumers
from ext.recompute.table import KEEP
from ext.recompute.windows import ON_DEMAND, Window


def candidates(problem: StageProblem, options: Sequence[Sequence[Option]]) -> list[int]:
    """Units about which a set decides: those that can be kept or dropped."""
    return [i for i, group in enumerate(options) if len(group) > 1 and any(option.decision == KEEP for option in group)]


class Sets:
    """All sets of kept units, one per row; columns are units."""

    def __init__(self, problem: StageProblem, options: Sequence[Sequence[Option]]) -> None:
        self.problem, self.options = problem, options
        units = problem.layer.units
        self.decide = [{option.decision: option for option in group} for group in options]
        self.time = np.array([unit.time for unit in units])
        self.inputs = [[problem.index[name] for name in unit.inputs] for unit in units]
        # Without a stage-wide window, or with one layer, every recompute holds its bytes once.
        whole = np.array([float(problem.num_layers * unit.bytes) for unit in units])
        self.on_demand_bytes = np.array(
            [
                float(group[ON_DEMAND].bytes_for(problem.num_layers)) if ON_DEMAND in group else 0.0
                for group in self.decide
            ]
        )
        self.extra_bytes = whole - self.on_demand_bytes
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

    def only(self, rows: np.ndarray) -> Sets:
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
