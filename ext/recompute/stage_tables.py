"""Tables for all layers of one stage, whatever kinds of layers it has. No torch.

Solvers decide about equal layers. A stage with several kinds is decided kind by kind, the smallest first: each may use
its share of what is left between the least and the most that the kinds can use, and the largest gets all that remains.
What one layer brings back for its own backward counts once for all kinds: a backward goes through one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ext.recompute.problem import InfeasibleBudget, Solution, StageProblem
from ext.recompute.table import KEEP, UNUSED, UnitTable, keep_all
from ext.recompute.transient import solve_tightly, transient_bytes
from ext.recompute.units import LayerCosts, UnitCosts
from ext.recompute.windows import BEFORE_BACKWARD, IN_BACKWARD, Window, all_reduce_windows

Solve = Callable[[StageProblem], Solution]
ALL = (*BEFORE_BACKWARD, *IN_BACKWARD)

_TRIALS = 4


@dataclass(frozen=True)
class StageLayers:
    """One stage as it is before tables are chosen.

    Attributes:
        layers: costs by position in the stage; None for a layer that is kept whole (see `worth_deciding`).
        in_flight: most micro-batches that the stage holds activations of.
        budget: bytes for what these layers hold, inputs included.
        windows: of the whole stage: capacities are seconds for all its layers together.
        forward_exposed: share of the micro-batches whose backward has no other one's forward before it.
    """

    layers: tuple[LayerCosts | None, ...]
    in_flight: int
    budget: int
    windows: tuple[Window, ...] = ()
    forward_exposed: float = 0.0


@dataclass(frozen=True)
class Part:
    """Equal layers of a stage and what was decided about them.

    Attributes:
        positions: of the layers within the stage, in order.
        problem: that was solved.
        solution: a table for each of the positions.
    """

    positions: tuple[int, ...]
    problem: StageProblem
    solution: Solution

    @property
    def transient(self) -> int:
        """Bytes that recomputes of one layer at a time hold at most."""
        return max(transient_bytes(self.problem.layer, table) for table in self.solution.tables)

    @property
    def resident(self) -> int:
        """All other bytes."""
        return self.solution.bytes - self.transient

    @property
    def kept_bytes(self) -> int:
        """Bytes per micro-batch that the forward keeps, without the layers' inputs."""
        return sum(unit.held for unit, decision in self._decisions() if decision == KEEP) + self.read_again

    @property
    def saved_bytes(self) -> int:
        """Bytes per micro-batch that the forward does not keep, against recomputing nothing."""
        return sum(unit.held for unit, decision in self._decisions() if decision != KEEP) - self.read_again

    @property
    def read_again(self) -> int:
        """Bytes per micro-batch that are kept for recomputes alone."""
        total = 0
        for table in self.solution.tables:
            units = self.problem.layer.units
            read = {name for unit in units if table[unit.name] not in (KEEP, UNUSED) for name in unit.inputs}
            total += sum(unit.bytes - unit.held for unit in units if table[unit.name] == KEEP and unit.name in read)
        return total

    def _decisions(self) -> Iterator[tuple[UnitCosts, str]]:
        for table in self.solution.tables:
            for unit in self.problem.layer.units:
                yield unit, table[unit.name]


@dataclass(frozen=True)
class StageTables:
    """Tables of one stage.

    Attributes:
        tables: by position in the stage.
        parts: the kinds of layers about which something was decided.
    """

    tables: tuple[UnitTable, ...]
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_parts(cls, num_layers: int, parts: Iterable[Part]) -> StageTables:
        """Of a stage with so many layers; those that no part decides about are kept."""
        tables, parts = [keep_all(())] * num_layers, tuple(parts)
        for part in parts:
            for position, table in zip(part.positions, part.solution.tables, strict=True):
                tables[position] = table
        return cls(tuple(tables), parts)

    @property
    def exposed(self) -> float:
        """Seconds of recomputation in the critical path, per micro-batch on average."""
        return sum(part.solution.exposed for part in self.parts)

    @property
    def bytes(self) -> int:
        """That the decided layers hold at most; a backward goes through one of them at a time."""
        return sum(part.resident for part in self.parts) + max((part.transient for part in self.parts), default=0)

    @property
    def num_recomputing(self) -> int:
        """Layers that recompute something."""
        return sum(any(decision not in (KEEP, UNUSED) for _, decision in table.decisions) for table in self.tables)

    def recomputed(self, *windows: str) -> list[list[UnitCosts]]:
        """By layer, the units that these windows recompute; all of them where no window is named."""
        return [
            [
                unit
                for unit in part.problem.layer.units
                if table[unit.name] in windows or (not windows and table[unit.name] not in (KEEP, UNUSED))
            ]
            for part in self.parts
            for table in part.solution.tables
        ]

    @property
    def kept_bytes(self) -> int:
        """Bytes per micro-batch that the forward keeps of these layers, without their inputs."""
        return sum(part.kept_bytes for part in self.parts)

    @property
    def read_again(self) -> int:
        """Bytes per micro-batch that are kept for recomputes alone."""
        return sum(part.read_again for part in self.parts)

    @property
    def num_units(self) -> int:
        """Recomputes of one micro-batch."""
        return sum(map(len, self.recomputed()))

    @property
    def saved_bytes(self) -> int:
        """Bytes per micro-batch that the forward does not keep."""
        return sum(part.saved_bytes for part in self.parts)


def solve_stage(stage: StageLayers, solve: Solve) -> StageTables:
    """Tables for the layers of a stage.

    Args:
        stage: see `StageLayers`.
        solve: finds tables for equal layers, or raises `InfeasibleBudget`.

    Raises:
        InfeasibleBudget: no tables fit; says the least that the stage can do with.
    """
    kinds = [_Kind(positions, costs) for positions, costs in kinds_of(stage.layers)]
    total = sum(kind.weight for kind in kinds)
    problems = [
        StageProblem(
            kind.costs,
            len(kind.positions),
            stage.in_flight,
            0,
            _windows(stage, kind, kind.weight / total / len(kind.positions)),
        )
        for kind in kinds
    ]
    most = [p.in_flight * p.num_layers * p.layer.activation_bytes for p in problems]
    if sum(most) <= stage.budget:
        parts = [Part(kind.positions, p, _keep_all(p)) for kind, p in zip(kinds, problems, strict=True)]
    elif len(kinds) == 1:
        only = replace(problems[0], budget=stage.budget)
        parts = [Part(kinds[0].positions, only, solve_tightly(only, solve))]
    else:
        parts = _solve_kinds(stage.budget, kinds, problems, most, solve)
    return StageTables.of_parts(len(stage.layers), parts)


def _solve_kinds(
    budget: int, kinds: Sequence[_Kind], problems: Sequence[StageProblem], most: Sequence[int], solve: Solve
) -> list[Part]:
    """One kind after another, the smallest first. A backward goes through one layer at a time: they share its room."""
    least = [Part(kind.positions, p, _least(p)) for kind, p in zip(kinds, problems, strict=True)]
    room = max((part.transient for part in least), default=0)
    if room + sum(part.resident for part in least) > budget:
        raise InfeasibleBudget(budget, room + sum(part.resident for part in least))
    order = sorted(range(len(kinds)), key=lambda k: most[k])
    left, parts = budget - room, list(least)
    for done, k in enumerate(order):
        later = order[done + 1 :]
        spare = left - sum(least[j].resident for j in order[done:])
        growth, wanted = most[k] - least[k].resident, sum(most[j] - least[j].resident for j in later)
        share = spare if not later else spare * growth // (growth + wanted) if growth > 0 else 0
        parts[k] = _within(least[k], least[k].resident + share, room, solve)
        left -= parts[k].resident + max(0, parts[k].transient - room)
        room = max(room, parts[k].transient)
    return parts


def _within(least: Part, given: int, room: int, solve: Solve) -> Part:
    """The tables of a kind that may take some bytes, and for one layer at a time those of a room that is there anyway.

    Args:
        least: its tables with least memory, which keep both.
        given: bytes.
        room: bytes.
        solve: finds tables.
    """
    transient = room
    for _ in range(_TRIALS):
        problem = replace(least.problem, budget=given + transient)
        try:
            part = replace(least, problem=problem, solution=solve_tightly(problem, solve))
        except InfeasibleBudget:
            break
        if part.resident + max(0, part.transient - room) <= given:
            return part
        transient = min(part.transient, transient - 1)
    return least


def worth_deciding(costs: LayerCosts) -> bool:
    """Whether there is anything to save in a layer."""
    return any(unit.bytes > 0 and unit.needed and not unit.keep for unit in costs.units)


@dataclass(frozen=True)
class _Kind:
    positions: tuple[int, ...]
    costs: LayerCosts

    @property
    def weight(self) -> float:
        """For the share of a window that these layers get."""
        return len(self.positions) * sum(unit.time for unit in self.costs.units) or 1e-12


def kinds_of(layers: Iterable[LayerCosts | None]) -> list[tuple[tuple[int, ...], LayerCosts]]:
    """Layers of one structure, with the least time that any of them took for each unit."""
    found: dict[object, list[tuple[int, LayerCosts]]] = {}
    for position, costs in enumerate(layers):
        if costs is not None:
            structure = costs.input_bytes, tuple(replace(unit, time=0.0) for unit in costs.units)
            found.setdefault(structure, []).append((position, costs))
    return [
        (tuple(position for position, _ in group), _fastest([costs for _, costs in group])) for group in found.values()
    ]


def _fastest(group: Sequence[LayerCosts]) -> LayerCosts:
    units = [
        replace(alike[0], time=min(unit.time for unit in alike))
        for alike in zip(*(costs.units for costs in group), strict=True)
    ]
    return replace(
        group[0],
        units=tuple(units),
        forward=min(costs.forward for costs in group),
        backward=min(costs.backward for costs in group),
    )


def _windows(stage: StageLayers, kind: _Kind, share: float) -> tuple[Window, ...]:
    """Those of the stage, of which each of these layers gets a share, and those under the layers' own all-reduces."""
    shared = tuple(replace(window, capacity=window.capacity * share) for window in stage.windows)
    waits = kind.costs.all_reduces
    own = () if waits is None else all_reduce_windows(waits, stage.in_flight, stage.forward_exposed)
    return (*shared, *own)


def _least(problem: StageProblem) -> Solution:
    """Tables that fit the smallest budget for which there are any."""
    # Reading a configuration must not import scipy.
    from ext.recompute.heu import solve_heu

    try:
        return solve_tightly(problem, solve_heu)
    except InfeasibleBudget as error:
        return solve_tightly(replace(problem, budget=error.smallest_budget), solve_heu)


def _keep_all(problem: StageProblem) -> Solution:
    """The solution where memory suffices for everything."""
    table = UnitTable.of({unit.name: KEEP if unit.needed or unit.keep else UNUSED for unit in problem.layer.units})
    held = problem.in_flight * problem.num_layers * problem.layer.activation_bytes
    return Solution((table,) * problem.num_layers, 0.0, held, "all kept")


def seconds(layers: Iterable[Iterable[UnitCosts]]) -> float:
    """Time of the units of some layers."""
    return sum(unit.time for units in layers for unit in units)


def size(layers: Iterable[Iterable[UnitCosts]]) -> int:
    """Bytes of the units of some layers."""
    return sum(unit.bytes for units in layers for unit in units)


def working_set(tables: StageTables, *windows: str) -> int:
    """Most bytes that the units of these windows, of one layer, hold at once; of all windows where none is named."""
    return max(
        (
            transient_bytes(part.problem.layer, table, windows or ALL)
            for part in tables.parts
            for table in part.solution.tables
        ),
        default=0,
    )
