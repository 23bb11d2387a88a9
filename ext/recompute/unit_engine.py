"""The unit engine: the layers of one stage for one micro-batch, each recomputed as its table says.

It has the shape of `ext.recompute.regions`: a pipeline engine calls layers through it in the forward, calls
`recompute` where its plan has an R action, and runs the backward inside `backward`. Several micro-batches can be in
flight; nothing is kept on the modules.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ext.core.errors import ConfigError
from ext.core.replay import is_replaying
from ext.recompute.filling import ForwardFiller, UnitListener
from ext.recompute.regions import MicrobatchRegions
from ext.recompute.stopwatch import stopwatch
from ext.recompute.table import KEEP, OPAQUE, UnitTable
from ext.recompute.unit_run import LayerRun, Surroundings
from ext.recompute.units import offers_units, units_of
from ext.recompute.windows import BEFORE_BACKWARD, ON_DEMAND


class MicrobatchUnits:
    """The recomputed layers of one stage for one micro-batch, from its forward to the end of its backward.

    A layer without units is one region: its table names it `OPAQUE`, and the region is dropped whole or kept.
    """

    def __init__(self, surroundings: Surroundings | None = None, next_backward: MicrobatchUnits | None = None) -> None:
        """For one micro-batch whose forward is to come.

        Args:
            surroundings: shared by all micro-batches of a stage.
            next_backward: the micro-batch whose backward is the stage's next one; under the all-reduces of this one's
                forward it recomputes what its tables give to F1 and F2.
        """
        self._at = surroundings if surroundings is not None else Surroundings()
        self._at.report.microbatches += 1
        self._counts: Counter[str] = Counter()
        self._runs: list[weakref.ref[LayerRun]] = []
        self._num_forward_windows = 0
        self._filler = None if next_backward is None else next_backward._early_recomputes()
        self._early = MicrobatchRegions(self._at.trackers, self._at.recomputing)
        self._late = MicrobatchRegions(self._at.trackers, self._at.recomputing)
        self._window = ON_DEMAND

    def call(self, layer: Any, inputs: Any, table: UnitTable, opaque_bytes: int = 0) -> Any:
        """``layer(inputs)`` without keeping what the table drops; ``inputs`` is a tensor or a tuple.

        Args:
            layer: a module or function; one that offers ``units()`` is run unit by unit.
            inputs: as the layer takes them.
            table: what to drop and when it comes back.
            opaque_bytes: that a layer without units drops, for the report.

        Raises:
            ConfigError: the layer's units do not fit its inputs.
            RecomputeError: a unit changes in place what would have to be recomputed.
        """
        if not torch.is_grad_enabled():
            return layer(inputs)
        if not offers_units(layer):
            return self._call_opaque(layer, inputs, table[OPAQUE], opaque_bytes)
        units = units_of(layer)
        given = _as_tuple(inputs)
        if len(given) != len(units.inputs):
            raise ConfigError(
                f"{type(layer).__name__} names the inputs {', '.join(units.inputs)} of its units and was called with "
                f"{len(given)}. Make its LayerUnits name as many inputs as it is called with."
            )
        run = LayerRun(units, table, list(constants_of(layer)), device_of(given, layer), self._at, self._counts)
        number = len(self._runs)
        run.listener = lambda unit: UnitListener(unit, self._runs, number, self._forward_window)
        self._runs.append(weakref.ref(run))
        return _through_hooks(layer, lambda final: run.forward(_as_tuple(final)), inputs)

    def _call_opaque(self, layer: Callable[[Any], Any], inputs: Any, decision: str, num_bytes: int) -> Any:
        if decision == KEEP:
            with self._at.around():
                return layer(inputs)
        device, report = device_of(_as_tuple(inputs), layer), self._at.report

        def run(given: Any) -> Any:
            if not is_replaying():
                with self._at.around():
                    return layer(given)
            stop = stopwatch(device)
            try:
                with self._at.around():
                    return layer(given)
            finally:  # torch ends a re-run by an exception as soon as it has what it needs
                report.add(self._window, num_bytes, stop())

        report.saved_bytes += num_bytes
        return (self._early if decision in BEFORE_BACKWARD else self._late).call(run, inputs)

    def _early_recomputes(self) -> ForwardFiller:
        return ForwardFiller(self._runs, self._num_forward_windows)

    def _forward_window(self) -> None:
        self._num_forward_windows += 1
        if self._filler is not None:
            self._filler.fill()

    def recompute(self, windows: Sequence[str] = BEFORE_BACKWARD) -> None:
        """Recompute now what the tables give to these windows; backward finds it.

        The layers come last first, as the backward will meet them, so that a byte reserve that does not suffice for
        all of them serves those that are freed soonest.
        """
        for reference in reversed(self._runs):
            run = reference()
            if run is not None:
                run.recompute(windows)
        if set(windows) & set(BEFORE_BACKWARD):
            self._window = windows[-1]
            try:
                self._early.recompute()
            finally:
                self._window = ON_DEMAND

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Every backward over these layers runs inside."""
        self._late.forget()
        with self._early.backward():  # the regions that were not re-run early need no group of their own
            yield

    @property
    def num_reruns(self) -> int:
        """Units and regions recomputed so far for this micro-batch."""
        return sum(self._counts.values()) + self._early.num_reruns + self._late.num_reruns


class UnitLayer:
    """Stands in for a layer while its forward runs for one micro-batch."""

    def __init__(self, layer: Any, microbatch: MicrobatchUnits, table: UnitTable, opaque_bytes: int = 0) -> None:
        self._layer = layer
        self._microbatch = microbatch
        self._table = table
        self._opaque_bytes = opaque_bytes

    def __call__(self, inputs: Any) -> Any:
        return self._microbatch.call(self._layer, inputs, self._table, self._opaque_bytes)


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def constants_of(layer: Any) -> Iterator[Tensor]:
    """Parameters and buffers of a module, or of the modules that a partial function is given."""
    if isinstance(layer, nn.Module):
        yield from layer.parameters()
        yield from layer.buffers()
    elif isinstance(layer, partial):
        for argument in layer.args:
            yield from constants_of(argument)


def device_of(inputs: Sequence[Any], layer: Any) -> torch.device:
    """The device whose random numbers the layer draws: that of its first input, else of its parameters."""
    for value in (*inputs, *constants_of(layer)):
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


def _through_hooks(layer: Any, forward: Callable[[Any], Any], inputs: Any) -> Any:
    """``forward(inputs)`` with the hooks of the module around it, as if it were the module's own forward."""
    if not isinstance(layer, nn.Module) or not _has_hooks(layer):
        return forward(inputs)
    own = layer.__dict__.get("forward")
    layer.__dict__["forward"] = forward
    try:
        return layer(inputs)
    finally:
        del layer.__dict__["forward"]
        if own is not None:
            layer.__dict__["forward"] = own


def _has_hooks(module: nn.Module) -> bool:
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        nn.modules.module._global_forward_hooks,
        nn.modules.module._global_forward_pre_hooks,
        nn.modules.module._global_backward_hooks,
        nn.modules.module._global_backward_pre_hooks,
    )
    return any(hooks)
