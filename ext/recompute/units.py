"""Units: the named pieces of a layer that are kept or recomputed one by one, as data. No torch.

A layer that offers ``units()`` returns a sequence of `Unit`, in the order in which its forward runs them, or a
`LayerUnits` where it has several inputs or outputs. What solvers need to know of the same units is `LayerCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from ext.core.errors import ConfigError

ATTENTION = "attention"
MLP = "mlp"


@dataclass(frozen=True)
class Unit:
    """One named piece of a layer's forward, as the layer runs it.

    Attributes:
        name: unique within the layer.
        fn: takes the values named by ``inputs`` and returns one tensor. It must be a function of these, of parameters
            and of random numbers alone, and must not change its inputs or its output in place later on.
        inputs: names of earlier units or of the layer's inputs.
        half: ``attention`` or ``mlp``: which windows of the backward come before it.
        keep: never recomputed (routing decisions of a mixture of experts, for example).
        communication: holds a collective; never recomputed early, since all ranks would have to agree when.
    """

    name: str
    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    half: str = ATTENTION
    keep: bool = False
    communication: bool = False


@dataclass(frozen=True)
class LayerUnits:
    """The units of one layer.

    Attributes:
        units: in the order of the forward.
        inputs: names of the layer's inputs, in the order of its arguments.
        outputs: names of what the layer returns, as a tuple if there are several; the last unit if empty.
    """

    units: tuple[Unit, ...]
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_graph([(unit.name, unit.inputs) for unit in self.units], self.inputs)
        known = {*self.inputs, *(unit.name for unit in self.units)}
        if not self.units:
            raise ConfigError("a layer offers no units. Return at least one, or drop its units() method.")
        if not self.outputs:
            object.__setattr__(self, "outputs", (self.units[-1].name,))
        if missing := [name for name in self.outputs if name not in known]:
            raise ConfigError(f"layer outputs {missing} are no units. Units: {', '.join(sorted(known))}.")


class HasUnits(Protocol):
    """A layer that the unit engine can run."""

    def units(self) -> Sequence[Unit] | LayerUnits: ...


def offers_units(layer: object) -> TypeGuard[HasUnits]:
    """Whether the layer's class has a method ``units``; an attribute of that name, a width say, is none."""
    return callable(getattr(type(layer), "units", None))


def units_of(layer: HasUnits) -> LayerUnits:
    """The layer's units, checked.

    Raises:
        ConfigError: names clash, or an input is not known before its unit.
    """
    units = layer.units()
    return units if isinstance(units, LayerUnits) else LayerUnits(tuple(units))


def run_units(units: LayerUnits, inputs: Sequence[Any]) -> Any:
    """The plain forward of a layer made of units: one after another, each value forgotten after its last reader."""
    values = dict(zip(units.inputs, inputs, strict=True))
    last = {name: i for i, unit in enumerate(units.units) for name in unit.inputs}
    for i, unit in enumerate(units.units):
        arguments = [values[name] for name in unit.inputs]
        for name in unit.inputs:
            if last[name] == i and name not in units.outputs:
                values.pop(name, None)
        values[unit.name] = unit.fn(*arguments)
    outputs = [values[name] for name in units.outputs]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def check_graph(nodes: Iterable[tuple[str, tuple[str, ...]]], inputs: Iterable[str]) -> None:
    """Checks that names are unique and that every unit's inputs come before it.

    Raises:
        ConfigError: lists all violations at once.
    """
    known = set(inputs)
    problems = []
    for name, needed in nodes:
        if name in known:
            problems.append(f"unit '{name}' appears twice. Give every unit of a layer its own name.")
        for missing in (n for n in needed if n not in known):
            problems.append(f"unit '{name}' reads '{missing}', which no earlier unit or layer input is called.")
        known.add(name)
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True)
class UnitCosts:
    """What a solver knows of one unit, for one micro-batch.

    Attributes:
        name: of the unit.
        inputs: names of earlier units; the layer's inputs, always kept, are left out.
        bytes: held from forward to backward if the unit is kept, and from recompute to backward if it is not.
        time: seconds of its forward, so of its recompute.
        needed: the backward reads its output or something it computed on the way; others serve as inputs only.
        half: ``attention`` or ``mlp``.
        keep: always kept.
        communication: recomputed on demand only.
        uses_rng: draws random numbers.
        view_of: the unit whose storage the output shares; it is kept only together with that unit.
        region: units of one region are decided alike; empty for a unit alone.
        only_read: part of ``bytes`` that no backward needs but recomputes of other units read.
    """

    name: str
    inputs: tuple[str, ...]
    bytes: int
    time: float
    needed: bool = True
    half: str = ATTENTION
    keep: bool = False
    communication: bool = False
    uses_rng: bool = False
    view_of: str = ""
    region: str = ""
    only_read: int = 0

    @property
    def held(self) -> int:
        """Bytes that the unit's kept values take where nothing is recomputed."""
        return self.bytes - self.only_read if self.needed or self.keep else 0


@dataclass(frozen=True)
class AllReduces:
    """Seconds that a tensor-parallel layer waits for its all-reduces when nothing is done meanwhile.

    Attributes:
        first_forward, second_forward: of its outputs, in the order of the forward.
        mlp_backward: of the gradient of the MLP half's input, behind the weight gradient that the host runs meanwhile.
        attention_backward: the same of the attention half.
    """

    first_forward: float = 0.0
    second_forward: float = 0.0
    mlp_backward: float = 0.0
    attention_backward: float = 0.0


@dataclass(frozen=True)
class LayerCosts:
    """A layer as the solvers see it.

    Attributes:
        units: in the order of the forward.
        input_bytes: of the layer's inputs, which are always kept.
        forward: seconds of the layer's forward without communication.
        backward: seconds of its backward without communication.
        all_reduces: waits under which recomputes can hide; None where no rank shares the layer.
    """

    units: tuple[UnitCosts, ...]
    input_bytes: int
    forward: float = 0.0
    backward: float = 0.0
    all_reduces: AllReduces | None = None

    def __post_init__(self) -> None:
        check_graph([(unit.name, unit.inputs) for unit in self.units], ())
        wrong = [
            f"unit '{unit.name}' takes {unit.time} s and {unit.bytes} bytes; give finite numbers of 0 or more."
            for unit in self.units
            if not (0 <= unit.time < math.inf and 0 <= unit.bytes < math.inf)
        ]
        names = {unit.name for unit in self.units}
        wrong += [
            f"unit '{unit.name}' shares the storage of '{unit.view_of}', which is no unit of its layer."
            for unit in self.units
            if unit.view_of and unit.view_of not in names
        ]
        if wrong:
            raise ConfigError(*wrong)

    @property
    def activation_bytes(self) -> int:
        """Bytes that one micro-batch holds where nothing is recomputed."""
        return self.input_bytes + sum(unit.held for unit in self.units)
