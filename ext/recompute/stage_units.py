"""A stage that recomputes unit by unit, for any host's engine: its layers run as their tables say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from ext.recompute.regions import RngTracker
from ext.recompute.report import ByteReserve, RecomputeReport
from ext.recompute.stage_tables import StageTables
from ext.recompute.table import OPAQUE
from ext.recompute.unit_engine import MicrobatchUnits, UnitLayer
from ext.recompute.unit_run import Surroundings

Around = Callable[[], AbstractContextManager[Any]]


class StageUnits:
    """The tables of one stage at work.

    Args:
        tables: one per layer of the stage.
        trackers: named RNG streams.
        reserve: bytes that recomputed values may hold before their backward asks for them; None for no limit.
        note: told of every tensor that is kept or brought back.

    Attributes:
        report: of the current step; see `start_step`.
        reserve: counts what recomputed values hold.
    """

    def __init__(
        self,
        tables: StageTables,
        trackers: Sequence[RngTracker] = (),
        reserve: int | None = None,
        note: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.tables = tables
        self.reserve = ByteReserve(reserve)
        self._at = Surroundings(trackers, self.reserve, note=note)
        self._opaque_bytes = {
            position: unit.bytes
            for part in tables.parts
            for unit in part.problem.layer.units
            if unit.name == OPAQUE
            for position in part.positions
        }

        self._with_windows = {
            position
            for part in tables.parts
            if part.problem.layer.all_reduces is not None and any(table.dropped for table in part.solution.tables)
            for position in part.positions
        }

    @property
    def report(self) -> RecomputeReport:
        return self._at.report

    def start_step(self) -> None:
        """Begin a new report, so that it is about one step."""
        self._at = replace(self._at, report=RecomputeReport())

    def start(
        self,
        layers: Sequence[Any],
        *,
        around: Around = nullcontext,
        recomputing: Around = nullcontext,
        next_backward: MicrobatchUnits | None = None,
    ) -> tuple[MicrobatchUnits, list[Any]]:
        """What to call in place of the stage's layers for one micro-batch, and the handle of its recomputes.

        Args:
            layers: of the stage, in order.
            around: entered around every layer or unit, in forward and recompute.
            recomputing: entered around every recompute.
            next_backward: the micro-batch whose backward comes next; see `MicrobatchUnits`.
        """
        microbatch = MicrobatchUnits(replace(self._at, around=around, recomputing=recomputing), next_backward)
        return microbatch, [
            UnitLayer(layer, microbatch, table, self._opaque_bytes.get(position, 0))
            if table.dropped or position in self._with_windows
            else _Kept(layer, around)
            for position, (layer, table) in enumerate(zip(layers, self.tables.tables, strict=True))
        ]


class _Kept:
    """A layer that keeps everything, called with the surroundings of those that do not."""

    def __init__(self, layer: Any, around: Around) -> None:
        self._layer, self._around = layer, around

    def __call__(self, inputs: Any) -> Any:
        with self._around():
            return self._layer(inputs)
