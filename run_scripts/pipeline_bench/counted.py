"""Emulated layers that count the activations which the engine and autograd really hold for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ext.runtime.split_backward import WeightGradQueue, active_queue
from ext.testing.emulated import EmulatedLayer, EmulatedTimes


class Meter:
    """What is held now, and the most that was."""

    def __init__(self) -> None:
        self.now = 0.0
        self.peak = 0.0

    def add(self, size: float) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class CountedLayer(EmulatedLayer):
    """An emulated layer whose backward needs an activation of a given size, its weight gradient too.

    All layers of a stage share the first one's meter (see `share_meter`).

    Args:
        times: as in `EmulatedLayer`.
        size: of the activation, in any unit; it takes one byte.
        width: of the last dimension.
    """

    def __init__(self, times: EmulatedTimes, size: float, width: int = 8) -> None:
        super().__init__(times, width)
        self.size = size
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        anchor = torch.empty(0, requires_grad=True)
        return super().forward(_Hold.apply(x, anchor, self, active_queue()))  # type: ignore[arg-type]


def share_meter(module: torch.nn.Module) -> Meter:
    """Let all counted layers of a module count together."""
    meter = Meter()
    for layer in module.modules():
        if isinstance(layer, CountedLayer):
            layer.meter = meter
    return meter


class _Activation(bytearray):
    """The memory of a tensor; counted for as long as any tensor or graph holds it."""

    def __init__(self, meter: Meter, size: float) -> None:
        super().__init__(1)
        self._meter, self._size = meter, size
        meter.add(size)

    def __del__(self) -> None:
        self._meter.add(-self._size)


class _Hold(torch.autograd.Function):
    """Keeps an activation until the layer's backward has run; where its W waits, until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: CountedLayer, queue: WeightGradQueue | None) -> Tensor:
        ctx.queue = queue
        ctx.save_for_backward(torch.frombuffer(_Activation(layer.meter, layer.size), dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (activation,) = ctx.saved_tensors
        if ctx.queue is not None:
            ctx.queue.defer(partial(_let_go, activation))
        return grads[0], None, None, None


def _let_go(activation: Tensor) -> None:
    """The activation goes with the job that holds it."""
