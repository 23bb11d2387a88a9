"""Ways to run the stage: without recompute, fully checkpointed, by tables on demand or overlapped, sub-pipelined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.rng import RngStream
from ext.comm.tensor_parallel.sub_pipeline import run_sub_pipelined
from ext.recompute.regions import MicrobatchRegions
from ext.recompute.report import RecomputeReport
from ext.recompute.table import UnitTable
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.testing.shared_unit_layer import SharedUnitLayer

Layers = Sequence[SharedUnitLayer]
Backward = Callable[[], AbstractContextManager[Any]]


class Stage:
    """The layers of this rank, and the micro-batches of a step."""

    def __init__(self, layers: Layers, inputs: Sequence[Tensor], stream: RngStream, group: TensorParallelGroup) -> None:
        self.layers, self.inputs, self.stream, self.group = layers, inputs, stream, group
        self._start = stream.capture()

    def step(self, mode: Mode) -> None:
        """All micro-batches, with one forward more than backwards; gradients are left in the weights."""
        self.stream.restore(self._start)
        torch.manual_seed(0)
        waiting: list[tuple[Tensor, Backward]] = []
        for x in self.inputs:
            waiting.append(mode.forward(self, x))
            if len(waiting) == 2:
                _backward(*waiting.pop(0))
        for output, around in waiting:
            _backward(output, around)
        mode.forget()


def _backward(output: Tensor, around: Backward) -> None:
    with around():
        output.square().mean().backward()


class Mode:
    """No recompute."""

    name = "none"

    def forward(self, stage: Stage, x: Tensor) -> tuple[Tensor, Backward]:
        """Output of one micro-batch, and what its backward must run inside."""
        for layer in stage.layers:
            x = layer(x)
        return x, nullcontext

    def forget(self) -> None:
        """A step is over."""


class Full(Mode):
    """Every layer recomputed in the backward, all-reduces included."""

    name = "full"

    def forward(self, stage: Stage, x: Tensor) -> tuple[Tensor, Backward]:
        regions = MicrobatchRegions((stage.stream,))
        for layer in stage.layers:
            x = regions.call(layer, x)
        return x, regions.backward


class Units(Mode):
    """Units recomputed as tables say."""

    def __init__(self, name: str, tables: Sequence[UnitTable]) -> None:
        self.name, self._tables = name, tables
        self.report = RecomputeReport()
        self._before: MicrobatchUnits | None = None

    def forward(self, stage: Stage, x: Tensor) -> tuple[Tensor, Backward]:
        surroundings = Surroundings(trackers=(stage.stream,), report=self.report)
        units = self._before = MicrobatchUnits(surroundings, self._before)
        for layer, table in zip(stage.layers, self._tables, strict=True):
            x = units.call(layer, x, table)
        return x, units.backward

    def forget(self) -> None:
        self._before = None


class SubPipelined(Mode):
    """No recompute, and the micro-batch in two parts."""

    name = "sub_pipelined"

    def forward(self, stage: Stage, x: Tensor) -> tuple[Tensor, Backward]:
        return run_sub_pipelined(stage.layers, x), nullcontext
