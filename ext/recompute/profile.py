"""Times and bytes of units, measured on the device and with the shapes at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ext.comm.tensor_parallel.hooks import Listener, listening
from ext.cost.collectives import fit_link
from ext.cost.hardware import Link
from ext.recompute.ambient import RngState
from ext.recompute.stopwatch import stopwatch
from ext.recompute.storage import storage_bytes, storage_key, storage_keys
from ext.recompute.table import OPAQUE
from ext.recompute.unit_engine import constants_of, device_of
from ext.recompute.units import (
    ATTENTION,
    MLP,
    AllReduces,
    LayerCosts,
    LayerUnits,
    Unit,
    UnitCosts,
    offers_units,
    units_of,
)

DEFAULT_REPEATS = 5


def profile_layer(layer: Any, inputs: Any, repeats: int = DEFAULT_REPEATS) -> LayerCosts:
    """Costs of a layer's units for one micro-batch; of the whole layer as one unit where it offers none.

    Weights, their gradients and random number streams are left as they were. Runs the layer ``repeats + 1`` times
    forward and backward; call it inside the autocast that training uses.

    Args:
        layer: as it will be called, on its device and in its mode.
        inputs: a tensor, or a tuple as the layer takes it.
        repeats: runs of which the fastest counts, behind one that warms up.
    """
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    units = units_of(layer) if offers_units(layer) else _as_one_unit(layer, isinstance(inputs, tuple), len(given))
    constants = list(constants_of(layer))
    device = device_of(given, layer)
    fresh = tuple(v.detach().requires_grad_(v.is_floating_point()) if isinstance(v, Tensor) else v for v in given)
    with RngState.capture(device, ()).restored(), torch.enable_grad():
        found = _sizes(units, fresh, constants)
        probes = [_AllReduceProbe(device) for _ in range(repeats + 1)]
        times = [_times(units, fresh, device) for _ in range(repeats + 1)][1:]
        backward = [_backward_time(units, fresh, constants, device, probe) for probe in probes][1:]
    costs = tuple(replace(cost, time=min(run[i] for run in times)) for i, cost in enumerate(found.costs(units)))
    seconds = sum(cost.time for cost in costs)
    waits = [probe.all_reduces() for probe in probes][1:]
    return LayerCosts(costs, found.input_bytes, seconds, min(backward), _fastest(waits))


class _AllReduceProbe:
    """Listens to the all-reduces of a layer and waits for each at once, so that nothing else hides it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forward: list[Callable[[], float]] = []
        self._backward: dict[str, list[Callable[[], float]]] = {ATTENTION: [], MLP: []}

    def of(self, unit: Unit) -> Listener:
        """Who listens to one unit."""
        return _UnitProbe(self, unit.half)

    def waited(self, work: Any, times: list[Callable[[], float]]) -> None:
        stop = stopwatch(self._device)
        work.wait()
        times.append(stop())

    def all_reduces(self) -> AllReduces | None:
        """What was measured; None where there was no all-reduce."""
        forward = [time() for time in self._forward]
        backward = {half: sum(time() for time in times) for half, times in self._backward.items()}
        if not forward and not any(self._backward.values()):
            return None
        return AllReduces(sum(forward[:1]), sum(forward[1:]), backward[MLP], backward[ATTENTION])


class _UnitProbe:
    def __init__(self, probe: _AllReduceProbe, half: str) -> None:
        self._probe, self._half = probe, half

    def forward_launched(self, work: Any) -> None:
        self._probe.waited(work, self._probe._forward)

    def backward_launched(self, work: Any) -> None:
        self._probe.waited(work, self._probe._backward[self._half])


def _fastest(waits: Sequence[AllReduces | None]) -> AllReduces | None:
    found = [astuple(each) for each in waits if each is not None]
    return AllReduces(*(min(times) for times in zip(*found, strict=True))) if found else None


@dataclass
class _Sizes:
    """Bytes by unit, from one forward.

    Attributes:
        input_bytes: of the layer's inputs.
        saved: names that some unit saved.
        internal: bytes that a unit saved of its own, by name.
        output: bytes of a unit's output that no other value and nothing that it saved holds, by name.
        base: the unit whose storage a unit's output shares.
        random: units that drew random numbers.
    """

    input_bytes: int = 0
    saved: set[str] = field(default_factory=set)
    internal: dict[str, int] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)

    def costs(self, units: LayerUnits) -> list[UnitCosts]:
        """Costs of the units, without their times."""
        names = [unit.name for unit in units.units]
        read = {name for unit in units.units for name in unit.inputs}
        result = []
        for unit in units.units:
            returned = unit.name in units.outputs
            # What a recompute may read counts as well as what the backward does.
            output = self.output[unit.name] if not returned and unit.name in (self.saved | read) else 0
            base = self.base.get(unit.name, "")
            result.append(
                UnitCosts(
                    unit.name,
                    tuple(name for name in unit.inputs if name in names),
                    self.internal[unit.name] + output,
                    0.0,
                    needed=unit.name in self.saved or self.internal[unit.name] > 0,
                    half=unit.half,
                    keep=unit.keep or (returned and names != [OPAQUE]),
                    communication=unit.communication,
                    uses_rng=unit.name in self.random,
                    view_of=base if base in names else "",
                    only_read=0 if unit.name in self.saved else output,
                )
            )
        return result


def _sizes(units: LayerUnits, inputs: Sequence[Any], constants: Sequence[Tensor]) -> _Sizes:
    found = _Sizes()
    fixed = storage_keys(constants)
    names: dict[int | None, str] = {}
    values = dict(zip(units.inputs, inputs, strict=True))
    for name, value in values.items():
        if isinstance(value, Tensor) and names.setdefault(storage_key(value), name) == name:
            found.input_bytes += storage_bytes(value)
    for unit in units.units:
        own: dict[int | None, Tensor] = {}

        def pack(tensor: Tensor, own: dict[int | None, Tensor] = own) -> Tensor:
            key = storage_key(tensor)
            if key in names:
                found.saved.add(names[key])
            elif key not in fixed:
                own[key] = tensor.detach()
            return tensor.detach()

        before = _random_states(inputs)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = unit.fn(*[values[name] for name in unit.inputs])
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(inputs), strict=True)):
            found.random.add(unit.name)
        values[unit.name] = output
        key = storage_key(output)
        owner = names.setdefault(key, unit.name)
        if owner != unit.name:
            found.base[unit.name] = owner
        found.internal[unit.name] = sum(storage_bytes(tensor) for tensor in own.values())
        found.output[unit.name] = storage_bytes(output) if owner == unit.name and key not in own else 0
        if key in own:
            found.saved.add(unit.name)
    return found


def _random_states(inputs: Sequence[Any]) -> list[Tensor]:
    state = RngState.capture(device_of(inputs, None), ())
    return [state.cpu] if state.on_device is None else [state.cpu, state.on_device]


def _times(units: LayerUnits, inputs: Sequence[Any], device: torch.device) -> list[float]:
    """Seconds of each unit's forward as a recompute runs it: with a graph, what is saved collected."""
    values = dict(zip(units.inputs, inputs, strict=True))
    times = []
    for unit in units.units:
        arguments = [_leaf(values[name]) for name in unit.inputs]
        saved: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor.detach()), _never):
            stop = stopwatch(device)
            values[unit.name] = unit.fn(*arguments).detach()
            times.append(stop()())
    return times


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _backward_time(
    units: LayerUnits,
    inputs: Sequence[Any],
    constants: Sequence[Tensor],
    device: torch.device,
    probe: _AllReduceProbe,
) -> float:
    values = dict(zip(units.inputs, inputs, strict=True))
    for unit in units.units:
        with listening(probe.of(unit)):
            values[unit.name] = unit.fn(*[values[name] for name in unit.inputs])
    outputs = [values[name] for name in units.outputs]
    roots = [v for v in outputs if isinstance(v, Tensor) and v.requires_grad]
    leaves = [v for v in (*inputs, *constants) if isinstance(v, Tensor) and v.requires_grad]
    if not roots or not leaves:
        return 0.0
    gradients = [torch.ones_like(root) for root in roots]
    stop = stopwatch(device)
    torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
    return stop()()


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a timed unit is never run backward")


def _as_one_unit(layer: Callable[[Any], Any], takes_tuple: bool, num_inputs: int) -> LayerUnits:
    inputs = tuple(f"input{i}" for i in range(num_inputs))

    def fn(*values: Any) -> Any:
        output = layer(values if takes_tuple else values[0])
        return output[0] if isinstance(output, tuple) else output

    return LayerUnits((Unit(OPAQUE, fn, inputs),), inputs)


def window_slowdown(work: Callable[[], Any], launch: Callable[[], Any], repeats: int = DEFAULT_REPEATS) -> float:
    """How much longer ``work`` takes while a collective runs; at least 1.

    Collective over whatever group ``launch`` uses: every rank must call it.

    Args:
        work: something like a recompute.
        launch: starts a collective that lasts longer than ``work`` and returns an object with ``wait()``.
        repeats: runs of which the median counts, behind one that warms up.
    """
    device = torch.device("cpu") if not torch.cuda.is_available() else torch.device("cuda", torch.cuda.current_device())
    alone, inside = [], []
    for _ in range(repeats + 1):
        stop = stopwatch(device)
        work()
        alone.append(stop()())
        handle = launch()
        stop = stopwatch(device)
        work()
        inside.append(stop()())
        handle.wait()
    return max(1.0, statistics.median(inside[1:]) / statistics.median(alone[1:]))


def fit_all_reduce(
    device: torch.device,
    group: Any = None,
    sizes: Sequence[int] = (2**12, 2**16, 2**20, 2**23),
    repeats: int = DEFAULT_REPEATS,
) -> Link:
    """The link of a group, fitted to measured all-reduces; the same on every rank.

    Collective over ``group``: every rank of it must call it.

    Args:
        device: of the tensors.
        group: process group; None for all ranks.
        sizes: bytes of the tensors.
        repeats: runs of which the median counts, behind one that warms up.
    """
    ranks = dist.get_world_size(group)
    measured = []
    for size in sizes:
        tensor = torch.zeros(size // 4, dtype=torch.float32, device=device)
        times = []
        for _ in range(repeats + 1):
            dist.barrier(group)
            stop = stopwatch(device)
            dist.all_reduce(tensor, group=group)
            times.append(stop()())
        measured.append(statistics.median(times[1:]))
    slowest = torch.tensor(measured, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    crossing = [2 * (ranks - 1) / ranks * size for size in sizes]
    return fit_link(crossing, slowest.tolist(), num_steps=2 * (ranks - 1))
