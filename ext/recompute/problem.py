"""The solvers' common model: a stage, what may be done with each of its units, and what that costs.

Every solver chooses one `Option` per unit. A further decision (offload, for example) is a further kind of option with
its own memory and resources; no solver changes for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ext.core.errors import ConfigError, InfeasibleError
from ext.recompute.table import KEEP, UNUSED, UnitTable
from ext.recompute.units import LayerCosts, UnitCosts
from ext.recompute.windows import ON_DEMAND, Window, on_demand_position

GIB = 2**30
_ALWAYS = -1
_NEVER = 10**9


class InfeasibleBudget(InfeasibleError, ConfigError):
    """No table fits the budget.

    Attributes:
        smallest_budget: bytes of the smallest budget for which there is one.
    """

    def __init__(self, budget: int, smallest_budget: int) -> None:
        self.smallest_budget = smallest_budget
        missing = math.ceil((smallest_budget - budget) / GIB * 1000) / 1000
        super().__init__(
            f"ext.recompute.memory_budget_gib: {_size(smallest_budget)} of activations are the least this stage can do "
            f"with, {_size(budget)} are left for them. Raise it by {missing:.3f} or more, or use more stages or a "
            "smaller micro-batch."
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / 2**20:.3f} MiB"


@dataclass(frozen=True)
class Option:
    """One thing that may be done with one unit.

    Attributes:
        decision: as in a `UnitTable`.
        cost: seconds in the critical path, per layer and micro-batch on average.
        resident: bytes held per layer of the stage.
        transient: bytes held for one layer at a time.
        position: when the value is there, in the order of time; inputs must be there by then.
        time: seconds of the window named ``decision`` that it takes.
    """

    decision: str
    cost: float
    resident: int
    transient: int
    position: int
    time: float = 0.0

    @property
    def recomputes(self) -> bool:
        return self.decision not in (KEEP, UNUSED)

    def serves(self, reader: Option) -> bool:
        """Whether the value is there when a recompute that reads it runs; on demand, inputs come on demand, too."""
        return self.position <= reader.position or self.decision == reader.decision == ON_DEMAND

    def bytes_for(self, num_layers: int) -> int:
        """Its share of the memory of a stage whose layers all do the same."""
        return num_layers * self.resident + self.transient


@dataclass(frozen=True)
class StageProblem:
    """Equal layers of one stage, for which tables are to be found.

    Attributes:
        layer: costs of one layer.
        num_layers: of the stage.
        in_flight: most micro-batches that the stage holds activations of.
        budget: bytes for activations of the stage.
        windows: in which recomputation is free, without C.
        temporaries_are_free: values that no backward reads count nothing where they come back on demand, as others
            take their place (see `ext.recompute.transient`).
    """

    layer: LayerCosts
    num_layers: int
    in_flight: int
    budget: int
    windows: tuple[Window, ...] = ()
    temporaries_are_free: bool = False

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.in_flight < 1:
            raise ConfigError(
                f"tables are for one layer and one micro-batch in flight or more, found {self.num_layers} layers and "
                f"{self.in_flight} micro-batches. Leave stages without such layers out."
            )
        names = [window.name for window in self.windows]
        wrong = [
            f"window '{window.name}' has a capacity of {window.capacity}, of which {window.exposed} is exposed, and a "
            f"slowdown of {window.slowdown}; give a capacity of 0 or more, a share and a factor of 1 or more."
            for window in self.windows
            if not (0 <= window.capacity < math.inf and 0 <= window.exposed <= 1 and 1 <= window.slowdown < math.inf)
        ]
        wrong += [f"window '{name}' is given twice." for name in sorted({n for n in names if names.count(n) > 1})]
        wrong += [f"'{name}' is no name for a window." for name in names if name in (KEEP, UNUSED, ON_DEMAND)]
        if wrong:
            raise ConfigError(*wrong)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each unit in the layer, by name."""
        return {unit.name: i for i, unit in enumerate(self.layer.units)}

    @cached_property
    def input_bytes(self) -> int:
        """Held for the layers' inputs, whatever is decided."""
        return self.in_flight * self.num_layers * self.layer.input_bytes

    @cached_property
    def window(self) -> dict[str, Window]:
        return {window.name: window for window in self.windows}

    @cached_property
    def options(self) -> tuple[tuple[Option, ...], ...]:
        """All options of each unit, by its position."""
        return tuple(tuple(self._options(unit)) for unit in self.layer.units)

    def _options(self, unit: UnitCosts) -> list[Option]:
        options = [Option(KEEP, 0.0, self.in_flight * unit.bytes, 0, _ALWAYS)]
        if unit.keep:
            return options
        if not unit.needed:
            options.append(Option(UNUSED, 0.0, 0, 0, _NEVER))
        on_demand = unit.bytes if unit.needed or not self.temporaries_are_free else 0
        options.append(Option(ON_DEMAND, unit.time, 0, on_demand, on_demand_position(unit.half)))
        if unit.communication:
            return options
        for window in self.windows:
            if window.admits(unit.half):
                resident, transient = (unit.bytes, 0) if window.stage_wide else (0, unit.bytes)
                cost, time = self.exposed_share(window) * unit.time, unit.time * window.slowdown
                options.append(Option(window.name, cost, resident, transient, window.position, time))
        return options

    def exposed_share(self, window: Window) -> float:
        """Share of layers and micro-batches whose part of a window runs on demand after all."""
        present = (1 - window.exposed) * (1 if window.last_layer else 1 - 1 / self.num_layers)
        return 1 - present

    def choice(self, table: UnitTable) -> list[Option]:
        """The options that a table stands for, per unit.

        Raises:
            KeyError: the table decides what the problem does not offer.
        """
        return [
            {option.decision: option for option in options}[table[unit.name]]
            for unit, options in zip(self.layer.units, self.options, strict=True)
        ]


@dataclass(frozen=True)
class Solution:
    """Tables for every layer of a stage, and how good they are.

    Attributes:
        tables: by layer, first layer first.
        exposed: seconds of recomputation in the critical path, per micro-batch of the stage on average.
        bytes: of activations that the stage holds at most.
        method: how it was found.
        bound: no tables have less exposed seconds than this.
        seconds: that the search took.
        fell_back: the search ran out of time and a greedy solution stands in.
    """

    tables: tuple[UnitTable, ...]
    exposed: float
    bytes: int
    method: str
    bound: float = 0.0
    seconds: float = 0.0
    fell_back: bool = False

    @property
    def gap(self) -> float:
        """Share by which ``exposed`` may lie above the best; 0 where it is proved."""
        return max(0.0, self.exposed - self.bound) / self.exposed if self.exposed > 0 else 0.0


def evaluate(problem: StageProblem, tables: Sequence[UnitTable]) -> tuple[float, int]:
    """Exposed seconds per micro-batch and bytes of a stage, with stage-wide windows pooled over its layers.

    What a window cannot hold, and what is assigned to a window that the last layer lacks, runs on demand.
    """
    units = problem.layer.units
    used = dict.fromkeys(problem.window, 0.0)
    exposed, resident, transient = 0.0, 0, 0
    for number, table in enumerate(tables):
        chosen = problem.choice(table)
        resident += sum(option.resident for option in chosen)
        transient = max(transient, sum(option.transient for option in chosen))
        exposed += sum(u.time for u, option in zip(units, chosen, strict=True) if option.decision == ON_DEMAND)
        for window in problem.windows:
            time = sum(option.time for option in chosen if option.decision == window.name)
            if not window.last_layer and number == len(tables) - 1:
                exposed += time / window.slowdown
            elif window.stage_wide:
                used[window.name] += time
            else:
                exposed += _spill(window, time, window.capacity)
    for window in problem.windows:
        exposed += _spill(window, used[window.name], len(tables) * window.capacity)
    return exposed, problem.input_bytes + resident + transient


def _spill(window: Window, time: float, capacity: float) -> float:
    """Exposed seconds of ``time`` in a window of ``capacity``."""
    over = max(0.0, time - capacity * (1 + 1e-9))
    return (over + window.exposed * (time - over)) / window.slowdown


def violations(problem: StageProblem, table: UnitTable, tolerance: float = 1e-9) -> list[str]:
    """What is wrong with one table for all layers: order, windows, memory; empty if it is a solution."""
    chosen = problem.choice(table)
    found = []
    for unit, option in zip(problem.layer.units, chosen, strict=True):
        if option.recomputes:
            late = [name for name in unit.inputs if not chosen[problem.index[name]].serves(option)]
            found += [f"{unit.name} in {option.decision} reads {name}, which is not there yet" for name in late]
        if option.decision == KEEP and unit.view_of and chosen[problem.index[unit.view_of]].decision != KEEP:
            found.append(f"{unit.name} is kept without {unit.view_of}, whose storage it shares")
        if unit.region:
            group = {o.decision for u, o in zip(problem.layer.units, chosen, strict=True) if u.region == unit.region}
            if len(group) > 1:
                found.append(f"region {unit.region} is not decided alike: {sorted(group)}")
    for window in problem.windows:
        time = sum(option.time for option in chosen if option.decision == window.name)
        if time > window.capacity * (1 + tolerance) + 1e-15:
            found.append(f"window {window.name} of {window.capacity:.3g} s is given {time:.3g} s")
    total = problem.input_bytes + sum(option.bytes_for(problem.num_layers) for option in chosen)
    if total > problem.budget:
        found.append(f"{total} bytes are more than the budget of {problem.budget}")
    return found


def layer_cost(chosen: Sequence[Option]) -> float:
    """Exposed seconds of one layer."""
    return math.fsum(option.cost for option in chosen)
