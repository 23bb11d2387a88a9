"""What the stages of a pipeline recompute in one step, planned and measured, window by window. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ext.recompute.pipeline_tables import PipelineTables
from ext.recompute.report import RecomputeReport, WindowUse
from ext.recompute.stage_tables import seconds, size
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.windows import ON_DEMAND, UNDER_FORWARD, WAIT


@dataclass(frozen=True)
class WindowRow:
    """One window of one stage; everything per micro-batch, as a mean over the step.

    Attributes:
        window: its name; `ON_DEMAND` is the exposed part.
        units_planned, units: recomputes.
        seconds_planned, seconds: that they take.
        bytes_planned, bytes: that they bring back.
    """

    window: str
    units_planned: float
    units: float
    seconds_planned: float
    seconds: float
    bytes_planned: float
    bytes: float


@dataclass(frozen=True)
class StageRecompute:
    """One stage.

    Attributes:
        stage: its index.
        windows: one row for each, those of the plan first.
        saved_planned, saved: bytes per micro-batch that its forwards do without.
        skipped: early recomputes that the byte reserve put off until they were asked for, in the whole step.
    """

    stage: int
    windows: tuple[WindowRow, ...]
    saved_planned: int
    saved: float
    skipped: int

    @property
    def exposed_planned(self) -> float:
        """Seconds of recomputation in the critical path, per micro-batch."""
        return sum(row.seconds_planned for row in self.windows if row.window == ON_DEMAND)

    @property
    def exposed(self) -> float:
        """The same as measured."""
        return sum(row.seconds for row in self.windows if row.window == ON_DEMAND)


def _share(tables: PipelineTables, stage: int, window: str) -> float:
    """Micro-batches that have the window; the others recompute on demand what the table gives to it."""
    if window in UNDER_FORWARD:
        found = [part.problem.window[window] for part in tables.stages[stage].parts if window in part.problem.window]
        return 1 - found[0].exposed if found else 0.0
    return tables.early[stage] if window == WAIT else float(window != ON_DEMAND)


def stage_recompute(tables: PipelineTables, stage: int, report: RecomputeReport) -> StageRecompute:
    """What a stage planned and, as its report has it, did. Waits for the device."""
    of_stage = tables.stages[stage]
    names = {d for table in of_stage.tables for _, d in table.decisions} - {KEEP, UNUSED, ON_DEMAND}
    planned: dict[str, list[float]] = {}
    late = [0.0, 0.0, 0.0]
    for name in (*sorted(names), ON_DEMAND):
        units = of_stage.recomputed(name)
        whole = [float(sum(map(len, units))), seconds(units), float(size(units))]
        share = _share(tables, stage, name)
        if name != ON_DEMAND:
            planned[name] = [share * value for value in whole]
        late = [value + (1 - share) * more for value, more in zip(late, whole, strict=True)]
    planned[ON_DEMAND] = late
    per = max(1, report.microbatches)
    rows = []
    for name in dict.fromkeys((*planned, *report.windows)):
        num_units, time, num_bytes = planned.get(name, [0.0, 0.0, 0.0])
        use = report.windows.get(name, WindowUse())
        rows.append(WindowRow(name, num_units, use.units / per, time, use.seconds / per, num_bytes, use.bytes / per))
    return StageRecompute(stage, tuple(rows), of_stage.saved_bytes, report.saved_bytes / per, report.skipped)


def lines(stages: Sequence[StageRecompute]) -> Iterator[str]:
    """One line per stage for people: planned/measured, per micro-batch."""
    for stage in stages:
        windows = [
            f"{row.window} {row.units_planned:.4g}/{row.units:.4g} units "
            f"{row.seconds_planned * 1e3:.2f}/{row.seconds * 1e3:.2f} ms"
            for row in stage.windows
            if row.units_planned or row.units
        ]
        saved = f"{stage.saved_planned / 2**20:.2f}/{stage.saved / 2**20:.2f} MiB saved"
        skipped = f", {stage.skipped} put off for want of memory" if stage.skipped else ""
        yield f"stage {stage.stage}: {saved}, {', '.join(windows) or 'nothing recomputed'}{skipped}"


def table(stages: Sequence[StageRecompute]) -> str:
    """What a log says."""
    head = "recomputation per micro-batch, planned/measured; P in pipeline waits, C on demand"
    return "\n".join([head, *lines(stages)])
