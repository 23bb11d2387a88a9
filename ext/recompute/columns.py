"""Column generation for OPT: how many layers of a stage use which configuration.

All layers of a stage are equal but for the windows that the last one lacks, so tables differ between layers only in
how often a configuration is used. For a given reserve (the bytes that one layer may hold for its recompute at a
time) the best mixture is a linear program over configurations, and the next useful configuration a small integer
program (pricing). The reserve is searched by splitting intervals: an interval's bound lets the configurations use its
upper end and charges the memory with its lower end. Where the configurations of that bound need no more than the lower
end, splitting cannot raise it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from ext.recompute.heu import solve_heu
from ext.recompute.milp import NONE, Program, add_layer, picked, solve, window_terms
from ext.recompute.problem import InfeasibleBudget, Option, StageProblem
from ext.recompute.reduce import reduced_options
from ext.recompute.table import UnitTable

_SCALE = 1e6
_TOLERANCE = 1e-6
_ROW_TOLERANCE = 2e-6
_PRICING_GAP = 1e-3
_NUM_SEEDS = 25


@dataclass(frozen=True)
class Column:
    """One configuration of a layer.

    Attributes:
        table: its decisions.
        cost: exposed seconds.
        resident: bytes per layer of the stage.
        transient: bytes for one layer at a time.
        times: seconds of each stage-wide window.
    """

    table: UnitTable
    cost: float
    resident: int
    transient: int
    times: tuple[float, ...]


class Kind:
    """Layers that have the same windows: all but the last one, or the last one alone."""

    def __init__(self, problem: StageProblem, count: int, last: bool) -> None:
        windows = tuple(replace(w, last_layer=True) for w in problem.windows if w.last_layer or not last)
        self.problem = replace(problem, windows=windows)
        self.count = count
        self.pooled = [w for w in problem.windows if w.stage_wide]
        self.options = reduced_options(self.problem, pooled_layers=problem.num_layers)
        self.columns: dict[Column, None] = {}

    def column(self, chosen: Sequence[Option]) -> Column:
        units = self.problem.layer.units
        return Column(
            UnitTable.of({u.name: o.decision for u, o in zip(units, chosen, strict=True)}),
            sum(o.cost for o in chosen),
            sum(o.resident for o in chosen),
            sum(o.transient for o in chosen),
            tuple(sum(o.time for o in chosen if o.decision == w.name) for w in self.pooled),
        )

    def price(
        self, byte_price: float, window_prices: Sequence[float], reserve: float, time_limit: float
    ) -> tuple[Column | None, float, bool]:
        """The cheapest configuration at these prices per byte and second within a reserve.

        Returns:
            The configuration, a lower bound of its price, and False where there is none at all.
        """
        prices = {w.name: price for w, price in zip(self.pooled, window_prices, strict=True)}
        program = Program()
        variables = add_layer(program, self.problem, self.options, _SCALE)
        transient = []
        for group, own in zip(self.options, variables, strict=True):
            for option, v in zip(group, own, strict=True):
                if v == NONE:
                    continue
                program.costs[v] += _SCALE * (
                    byte_price * option.resident + prices.get(option.decision, 0.0) * option.time
                )
                if option.transient:
                    transient.append((v, option.transient / max(1.0, reserve)))
        for window in self.problem.windows:
            if not window.stage_wide and (terms := window_terms(self.options, variables, window.name, _SCALE)):
                program.row(terms, -np.inf, window.capacity * _SCALE)
        # HiGHS takes a row as kept when it is off by 1e-6; what is beyond the reserve must not come back.
        program.row(transient, -np.inf, 1 - _ROW_TOLERANCE)
        result = program.solve(time_limit, _PRICING_GAP)
        if result.x is None:
            return None, 0.0, result.status != 2
        return self.column(picked(self.options, variables, result.x)), result.mip_dual_bound / _SCALE, True


class ColumnSearch:
    """Best mixture of configurations for a stage, with a bound.

    Args:
        problem: the stage.
        deadline: `time.perf_counter` value at which the search stops.
        gap: the relative gap at which it stops.
    """

    def __init__(self, problem: StageProblem, deadline: float, gap: float) -> None:
        # A window without capacity would only make the last layer look different from the others.
        problem = replace(problem, windows=tuple(w for w in problem.windows if w.capacity > 0))
        self.problem, self.deadline, self.gap = problem, deadline, gap
        self.room = max(1, problem.budget - problem.input_bytes)  # in units of which the memory's row is written
        if all(window.last_layer for window in problem.windows):
            self.kinds = [Kind(problem, problem.num_layers, last=False)]
        elif problem.num_layers == 1:
            self.kinds = [Kind(problem, 1, last=True)]
        else:
            self.kinds = [Kind(problem, problem.num_layers - 1, last=False), Kind(problem, 1, last=True)]
        self.pooled = self.kinds[0].pooled
        self.best: tuple[UnitTable, ...] | None = None
        self.cost = float("inf")
        self.bound = 0.0

    def _seed(self) -> None:
        """Starts from what one table for all layers would be under budgets from the smallest to all that is wanted."""
        for kind in self.kinds:
            layers = kind.problem.num_layers
            most = kind.problem.input_bytes + sum(group[0].bytes_for(layers) for group in kind.problem.options)
            for share in np.linspace(1.0, 0.0, _NUM_SEEDS):
                if time.perf_counter() > self.deadline:
                    return
                try:
                    found = solve_heu(replace(kind.problem, budget=int(share * most)), time_limit=0.0)
                except InfeasibleBudget:
                    break
                kind.columns[kind.column(kind.problem.choice(found.tables[0]))] = None

    def run(self) -> None:
        """Splits the reserve, the interval with the lowest bound first, until the gap is closed or time is up."""
        self._seed()
        self._round()
        most = sum(max((o.transient for o in group), default=0) for group in self.kinds[0].options)
        intervals = [(0.0, 0.0, min(most, self.room) * (1 + 2 * _ROW_TOLERANCE))]
        leaves: list[float] = []
        while intervals:
            bound, low, high = intervals[0]
            self.bound = min([bound, *leaves])
            if self._closed(bound) or time.perf_counter() > self.deadline:
                break
            heapq.heappop(intervals)
            relaxed, needed = self._relax(low, high)
            found = max(bound, relaxed)
            if self._closed(found):
                continue
            self._round()
            if needed <= low:
                leaves.append(found)
            else:
                heapq.heappush(intervals, (found, low, needed - 1))
                heapq.heappush(intervals, (found, needed, high))
        else:
            self.bound = min([self.cost * (1 - self.gap), *leaves])

    def _closed(self, bound: float) -> bool:
        return bound >= self.cost * (1 - self.gap)

    def _relax(self, low: float, high: float) -> tuple[float, float]:
        """Bound of the exposed time where the reserve lies between ``low`` and ``high``; infinite if nothing fits.

        Returns:
            The bound, and the reserve that its configurations need.
        """
        bound, needed = 0.0, high
        for kind in self.kinds:
            if not any(column.transient <= high for column in kind.columns):
                for price in (1.0, 0.0):
                    column, _, possible = kind.price(price, [0.0] * len(self.pooled), high, self._left())
                    if column is None:
                        return bound if possible else float("inf"), low
                    kind.columns[column] = None
        while time.perf_counter() < self.deadline:
            value, needed, byte_price, window_prices, kind_prices = self._master(low, high)
            lower, improved = value, False
            for kind, kind_price in zip(self.kinds, kind_prices, strict=True):
                column, price, _ = kind.price(byte_price, window_prices, high, self._left())
                if column is None:
                    return bound, needed
                lower += kind.count * min(0.0, price - kind_price)
                if price < kind_price - _TOLERANCE * abs(value) and column not in kind.columns:
                    kind.columns[column] = None
                    improved = True
            bound = max(bound, lower)
            if not improved or self._closed(bound):
                break
        return bound, needed

    def _left(self) -> float:
        return max(0.01, self.deadline - time.perf_counter())

    def _usable(self, reserve: float) -> list[list[Column]]:
        return [[c for c in kind.columns if c.transient <= reserve] for kind in self.kinds]

    def _rows(self, columns: Sequence[Sequence[Column]]) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients of memory (in units of the room) and windows, and of the number of layers of each kind."""
        flat = [c for group in columns for c in group]
        limits = np.array(
            [[c.resident / self.room for c in flat]]
            + [[c.times[k] * _SCALE for c in flat] for k in range(len(self.pooled))]
        )
        counts = np.array(
            [[float(i == k) for i, group in enumerate(columns) for _ in group] for k in range(len(columns))]
        )
        return limits, counts

    def _uppers(self, reserve: float) -> np.ndarray:
        layers = self.problem.num_layers
        return np.array([1 - reserve / self.room, *(layers * w.capacity * _SCALE for w in self.pooled)])

    def _master(self, low: float, high: float) -> tuple[float, float, float, list[float], list[float]]:
        """The linear program over the configurations.

        Returns:
            Its value, the reserve that its configurations need, and its prices per byte, window second and layer.
        """
        columns = self._usable(high)
        limits, counts = self._rows(columns)
        costs = np.array([c.cost * _SCALE for group in columns for c in group])
        # A layer left out costs more than any configuration: the program always has a solution.
        penalty = _SCALE * 10 * sum(u.time for u in self.problem.layer.units)
        num_kinds = len(self.kinds)
        result = linprog(
            np.concatenate([costs, np.full(num_kinds, penalty)]),
            A_ub=np.hstack([limits, np.zeros((len(limits), num_kinds))]),
            b_ub=self._uppers(low),
            A_eq=np.hstack([counts, np.eye(num_kinds)]),
            b_eq=[float(kind.count) for kind in self.kinds],
            method="highs",
        )
        prices = -result.ineqlin.marginals
        flat = [c for group in columns for c in group]
        used = [c.transient for c, number in zip(flat, result.x, strict=False) if number > _TOLERANCE]
        return (
            result.fun / _SCALE,
            float(max(used, default=0)),
            prices[0] / _SCALE / self.room,
            list(prices[1:]),
            [price / _SCALE for price in result.eqlin.marginals],
        )

    def _round(self) -> None:
        """The best whole mixture of the configurations at hand, for every reserve that one of them needs."""
        reserves = sorted({c.transient for kind in self.kinds for c in kind.columns})
        for reserve in reserves:
            if reserve > self.room or time.perf_counter() > self.deadline:
                break
            columns = self._usable(reserve)
            # The program over the same configurations with divisible layers bounds that over whole ones.
            if not all(columns) or self._closed(self._master(reserve, reserve)[0]):
                continue
            limits, counts = self._rows(columns)
            flat = [c for group in columns for c in group]
            numbers = [float(kind.count) for kind in self.kinds]
            result = solve(
                np.array([c.cost * _SCALE for c in flat]),
                constraints=[
                    (limits, -np.inf, self._uppers(reserve)),
                    (counts, numbers, numbers),
                ],
                integrality=np.ones(len(flat)),
                bounds=(0, max(numbers)),
                time_limit=self._left(),
                relative_gap=1e-4,
            )
            if result.x is None:
                continue
            uses = np.rint(result.x).astype(int)
            cost = float(sum(c.cost * n for c, n in zip(flat, uses, strict=True)))
            total = sum(c.resident * int(n) for c, n in zip(flat, uses, strict=True)) + reserve
            if cost < self.cost and total <= self.room:
                self.cost = cost
                self.best = tuple(c.table for c, n in zip(flat, uses, strict=True) for _ in range(n))
