"""One layer of units for one micro-batch: what its forward keeps, and how the rest comes back.

Autograd saves tensors through a hook. A saved tensor whose storage is the output of a dropped unit becomes a reference
to that unit with its size and strides; what a dropped unit saves of its own (a mask, statistics) becomes a reference
with a number. A recompute runs the unit's function once more on detached inputs, collects what it saves in the same
order, and frees all of it when the last reference has been read. The graph is that of the forward throughout, so a
wrong table can cost time, never change a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ext.comm.tensor_parallel.hooks import Listener, listening
from ext.core.errors import ExtError
from ext.recompute.ambient import AutocastState, RngState, default_device
from ext.recompute.dropped import DroppedUnit
from ext.recompute.regions import RngTracker
from ext.recompute.report import ByteReserve, RecomputeReport
from ext.recompute.stopwatch import stopwatch
from ext.recompute.storage import View, storage_bytes, storage_key, storage_keys
from ext.recompute.table import KEEP, UnitTable
from ext.recompute.units import LayerUnits, Unit
from ext.recompute.windows import ON_DEMAND


class RecomputeError(ExtError, RuntimeError):
    """A unit cannot be recomputed faithfully: it changed a tensor in place, or ran differently the second time."""


@dataclass(frozen=True)
class Surroundings:
    """What the runs of one stage share.

    Attributes:
        trackers: named RNG streams.
        reserve: of the bytes that early recomputes may hold.
        report: counts what is recomputed where.
        around: entered around every run of a unit or region, in forward and recompute.
        recomputing: entered around every recompute, outside of ``around``.
        note: told of every tensor that is kept or brought back.
    """

    trackers: Sequence[RngTracker] = ()
    reserve: ByteReserve = field(default_factory=ByteReserve)
    report: RecomputeReport = field(default_factory=RecomputeReport)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    recomputing: Callable[[], AbstractContextManager[Any]] = nullcontext
    note: Callable[[Tensor], Any] | None = None


class _Kept(NamedTuple):
    """A saved tensor that stays, with its version: hooks take autograd's own check for changes away."""

    tensor: Tensor
    version: int


class _Reference(NamedTuple):
    """A saved tensor that was dropped: a view of a unit's output, or the n-th that the unit saved of its own."""

    run: LayerRun
    unit: str
    view: View | None
    number: int


class LayerRun:
    """Runs the units of one layer for one micro-batch and brings back what their forward dropped.

    Args:
        units: of the layer.
        table: which of them to drop, and in which window each comes back.
        constants: parameters and buffers, which are never dropped.
        device: whose random numbers and autocast the layer uses.
        surroundings: see `Surroundings`.
        counts: where recomputes of this micro-batch are counted, by window.

    Attributes:
        listener: gives for each unit who is told of its all-reduces.
    """

    def __init__(
        self,
        units: LayerUnits,
        table: UnitTable,
        constants: Sequence[Tensor],
        device: torch.device,
        surroundings: Surroundings,
        counts: Counter[str],
    ) -> None:
        self.listener: Callable[[Unit], Listener | None] = lambda unit: None
        self._units, self._table, self._device, self._at = units, table, device, surroundings
        self._counts = counts
        self._constants = constants
        self._dropped: dict[str, DroppedUnit] = {}
        self._autocast, self._default_device = AutocastState.capture(device), default_device()
        # What the layer returns lives in the next one anyway.
        self._droppable = {
            unit.name
            for unit in units.units
            if table[unit.name] != KEEP and not unit.keep and unit.name not in units.outputs
        }
        self._kept: dict[str, Any] = {}
        self._needs_grad: dict[str, bool] = {}
        self._names: dict[int, str] = {}

    # -- forward -------------------------------------------------------------------------------------------

    def forward(self, inputs: Sequence[Any]) -> Any:
        """The layer's output for these inputs, one per name in its ``inputs``."""
        values: dict[str, Any] = dict(zip(self._units.inputs, inputs, strict=True))
        versions: dict[str, int] = {}
        self._constant_keys = storage_keys(self._constants)
        self._constant_versions = self._versions_of_constants()
        for name, value in values.items():
            self._register(name, value, versions)
        for unit in self._units.units:
            arguments = [values[name] for name in unit.inputs]
            output, own = self._first_run(unit, arguments)
            if not isinstance(output, Tensor):
                raise RecomputeError(f"unit '{unit.name}' returned {type(output).__name__}; a unit returns one tensor.")
            values[unit.name] = output
            base = self._register(unit.name, output, versions)
            dropped = self._dropped.get(unit.name)
            if dropped is not None:
                dropped.output = View.of(output)
                if base == unit.name and storage_key(output) not in own:
                    dropped.output_bytes = storage_bytes(output)
        self._finish(values, versions)
        outputs = [values[name] for name in self._units.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _register(self, name: str, value: Any, versions: dict[str, int]) -> str:
        """Notes a named value; returns the name of the value whose storage it shares, mostly its own."""
        if not isinstance(value, Tensor):
            return name
        self._needs_grad[name] = value.requires_grad
        versions[name] = value._version
        key = storage_key(value)
        return name if key is None else self._names.setdefault(key, name)

    def _first_run(self, unit: Unit, arguments: Sequence[Any]) -> tuple[Any, set[int | None]]:
        """The unit's output, and the storages of what it saved of its own if it is dropped."""
        dropped = None
        memory: AbstractContextManager[Any] = nullcontext()
        if unit.name in self._droppable:
            dropped = DroppedUnit(unit, RngState.capture(self._device, self._at.trackers))
            self._dropped[unit.name] = dropped
            memory = dropped.memory.recording()
        own: dict[int | None, Tensor] = {}  # held until the unit ends, so that no two have the same storage

        def pack(tensor: Tensor) -> _Kept | _Reference:
            key = storage_key(tensor)
            name = self._names.get(key) if key is not None else None
            if key in self._constant_keys or (name is None and dropped is None):
                return self._keep(tensor)
            if name is not None:
                source = self._dropped.get(name)
                if source is None or not source.gives(tensor):
                    return self._keep(tensor)
                source.references += 1
                source.output_read = True
                return _Reference(self, name, View.of(tensor), 0)
            assert dropped is not None
            dropped.internals.append((tensor.size(), tensor.dtype))
            dropped.references += 1
            if key is None or key not in own:
                own[key] = tensor.detach()
                dropped.saved_bytes += storage_bytes(tensor)
            return _Reference(self, unit.name, None, len(dropped.internals) - 1)

        with memory, self._at.around(), listening(self.listener(unit)), saved_tensors_hooks(pack, _unpack):
            output = unit.fn(*arguments)
        before, self._constant_versions = self._constant_versions, self._versions_of_constants()
        if dropped is not None and before != self._constant_versions:
            raise RecomputeError(
                f"unit '{unit.name}' changes a parameter or buffer (running statistics?) and would do so again when it "
                "is recomputed. Keep it (keep=True)."
            )
        keys = set(own)
        own.clear()  # the hook, and with it this, lives as long as the graph
        return output, keys

    def _versions_of_constants(self) -> int:
        return sum([tensor._version for tensor in self._constants])

    def _finish(self, values: dict[str, Any], versions: dict[str, int]) -> None:
        """Keeps what recomputes will read and checks that nothing of it was changed in place."""
        read: set[str] = set()
        for dropped in reversed(self._dropped.values()):
            dropped.unread = dropped.references
            if dropped.references or dropped.readers:  # else nothing will ever bring it back
                read.update(dropped.unit.inputs)
                for name in dropped.unit.inputs:
                    if name in self._dropped:
                        self._dropped[name].readers.add(dropped.unit.name)
            if not (dropped.output_read or dropped.readers):
                dropped.output_bytes = 0
            self._at.report.saved_bytes += dropped.dropped_bytes
        for name in {*read, *self._dropped}:
            value = values[name]
            if isinstance(value, Tensor) and value._version != versions[name]:
                raise RecomputeError(
                    f"'{name}' was changed in place by a unit that reads it, but the backward would recompute it or "
                    "from it. Make the change out of place, or let the table keep the units that read it."
                )
        for name in read:
            source = self._dropped.get(name)
            if source is None:
                value = values[name]
                self._kept[name] = self._keep(value) if isinstance(value, Tensor) else value
        self._names.clear()

    def _keep(self, tensor: Tensor) -> _Kept:
        if self._at.note is not None:
            self._at.note(tensor)
        return _Kept(tensor.detach(), tensor._version)

    # -- recompute -----------------------------------------------------------------------------------------

    def recompute(self, windows: Sequence[str]) -> None:
        """Recomputes what the table gives to these windows, in forward order, as far as the byte reserve allows."""
        for unit in self._units.units:
            dropped = self._dropped.get(unit.name)
            if dropped is None or self._table[unit.name] not in windows:
                continue
            if dropped.runs or not (dropped.unread or dropped.readers):
                continue
            chain = self._missing(unit.name)
            if any(self._dropped[name].unit.communication for name in chain):
                continue
            if self._at.reserve.allows(sum(self._dropped[name].bytes for name in chain)):
                self._bring_back(unit.name, self._table[unit.name])
            else:
                self._at.report.skipped += 1

    def awaits(self, window: str) -> bool:
        """Whether anything that the table gives to ``window`` was dropped and is not back."""
        return any(self._table[name] == window and not dropped.runs for name, dropped in self._dropped.items())

    def _missing(self, name: str) -> set[str]:
        """The unit and all dropped units that must be recomputed before it."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            current = waiting.pop()
            dropped = self._dropped.get(current)
            if dropped is not None and not dropped.live and current not in found:
                found.add(current)
                waiting.extend(dropped.unit.inputs)
        return found

    def _value(self, name: str, window: str) -> Any:
        dropped = self._dropped.get(name)
        if dropped is None:
            kept = self._kept[name]
            if isinstance(kept, _Kept):
                if kept.tensor._version != kept.version:
                    raise RecomputeError(f"'{name}' was changed in place after the forward of its layer.")
                return kept.tensor
            return kept
        if not dropped.live:
            self._bring_back(name, window)
        return dropped.value

    def _bring_back(self, name: str, window: str) -> None:
        dropped = self._dropped[name]
        unit = dropped.unit
        arguments = []
        for needed in unit.inputs:
            if needed in self._dropped:
                self._dropped[needed].readers.add(name)
            value = self._value(needed, window)
            if isinstance(value, Tensor):
                value = value.detach().requires_grad_(self._needs_grad[needed])
            arguments.append(value)
        known = storage_keys((*arguments, *self._constants))
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            key = storage_key(tensor)
            if key is None or key not in known:
                saved.append(tensor.detach())

        stop = stopwatch(self._device)
        with (
            dropped.rng.restored(),
            self._autocast.restored(),
            self._default_device,
            dropped.memory.replaying(),
            listening(None),
            self._at.recomputing(),
            self._at.around(),
            torch.enable_grad(),  # with a graph, or nothing would be saved
            saved_tensors_hooks(collect, _never),
        ):
            output = unit.fn(*arguments).detach()
        timing = stop()
        self._check(dropped, output, saved)
        dropped.value = output if dropped.output_read or dropped.readers else None
        dropped.saved, dropped.live = saved, True
        if self._at.note is not None:
            for tensor in saved if dropped.value is None else (*saved, dropped.value):
                self._at.note(tensor)
        dropped.runs += 1
        self._at.report.repeated += dropped.runs > 1
        self._counts[window] += 1
        self._at.report.add(window, dropped.bytes, timing)
        self._at.reserve.take(dropped.bytes)
        for needed in unit.inputs:
            source = self._dropped.get(needed)
            if source is not None:
                source.readers.discard(name)
                self._free_if_done(source)
        self._free_if_done(dropped)

    def _check(self, dropped: DroppedUnit, output: Tensor, saved: Sequence[Tensor]) -> None:
        found = [(tensor.size(), tensor.dtype) for tensor in saved]
        if found != dropped.internals or View.of(output) != dropped.output:
            raise RecomputeError(
                f"unit '{dropped.unit.name}' ran differently when it was recomputed: its forward gave {dropped.output} "
                f"and saved {dropped.internals}, its recompute gave {View.of(output)} and saved {found}. A unit must "
                "depend on its inputs, parameters and random numbers alone; keep it otherwise (keep=True)."
            )

    # -- backward ------------------------------------------------------------------------------------------

    def read(self, reference: _Reference) -> Tensor:
        """The tensor that a reference stands for; recomputed now where it is not there."""
        dropped = self._dropped[reference.unit]
        if not dropped.live:
            self._bring_back(reference.unit, ON_DEMAND)
        if reference.view is None:
            tensor = dropped.saved[reference.number]
        else:
            assert dropped.value is not None
            _, size, stride, offset = reference.view
            tensor = dropped.value.as_strided(size, stride, offset)
        dropped.unread -= 1
        self._free_if_done(dropped)
        return tensor

    def _free_if_done(self, dropped: DroppedUnit) -> None:
        """Frees a value that was read as often as it was saved and that no recompute will ask for."""
        if dropped.live and dropped.unread <= 0 and not dropped.readers:
            dropped.value, dropped.saved, dropped.live = None, [], False
            dropped.unread = dropped.references  # a second backward reads as often again
            self._at.reserve.give(dropped.bytes)

    def __del__(self) -> None:
        for dropped in self._dropped.values():
            if dropped.live:
                self._at.reserve.give(dropped.bytes)
                dropped.live = False


def _unpack(packed: _Kept | _Reference) -> Tensor:
    if isinstance(packed, _Reference):
        return packed.run.read(packed)
    if packed.tensor._version != packed.version:
        raise RecomputeError(
            f"a tensor of size {tuple(packed.tensor.size())} that the backward needs was changed in place: it is at "
            f"version {packed.tensor._version}, version {packed.version} was saved."
        )
    return packed.tensor


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a recompute is never run backward")
