"""Placement of one set's recomputed units into windows: a depth-first search with a bound."""

from __future__ import annotations

import numpy as np

from ext.recompute.problem import Option
from ext.recompute.sets import Sets
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.windows import ON_DEMAND, on_demand_position

_ROUNDING = 1e-12


class Packing:
    """Depth-first placement of one set's recomputed units into windows, in forward order."""

    def __init__(self, sets: Sets, row: int, room: int, limit: float, max_nodes: int) -> None:
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
        # When each unit's value is there: as placed, or at least as late as no window can take it.
        self.there = [-1] * len(problem.layer.units)
        self.late = [on_demand_position(problem.layer.units[i].half) for i in self.units]
        self.hideable = [
            [
                (o.decision, o.time, float(sets.extra_bytes[i]) if self.stage_wide[o.decision] else 0.0, o.position)
                for o in group
                if o.decision != ON_DEMAND
            ]
            for i, group in zip(self.units, self.choices, strict=True)
        ]
        # From each unit on: the most time per byte, and the windows that admit any of it, cheapest first.
        self.ratio = [0.0] * (len(self.units) + 1)
        self.open: list[list[tuple[str, float, float, bool]]] = [[] for _ in range(len(self.units) + 1)]
        windows = sorted(problem.windows, key=problem.exposed_share)
        halves: set[str] = set()
        for k in reversed(range(len(self.units))):
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
        rest = cost = 0.0
        for j in range(k, len(self.units)):
            i = self.units[j]
            ready = max((self.there[m] for m in self.sets.inputs[i]), default=-1)
            self.there[i] = -1
            for name, needed, extra, position in self.hideable[j]:
                if position >= ready and self.left[name] >= needed and self.slack >= extra:
                    rest += self.times[j]
                    break
            else:
                cost += self.times[j]
                self.there[i] = self.late[j]
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
            self.there[i] = option.position
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
