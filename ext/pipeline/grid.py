"""A simulation as text: one line per rank, one column per unit of time."""

from __future__ import annotations

from collections.abc import Iterator

from ext.pipeline.actions import R
from ext.pipeline.simulate import Simulation

MAX_COLUMNS = 160


def grid(simulation: Simulation, *, max_columns: int = MAX_COLUMNS) -> str:
    """What every rank does over time: ``F0 r0 B0``, with ``r`` for a recompute inside B or I and ``R`` for its own.

    A column is the largest unit of time that divides all times. Where that needs more than ``max_columns``, it is
    the step time over ``max_columns`` and a cell shows what runs in the middle of it. ``.`` is idle.
    """
    step = simulation.step_time
    unit = max(_common_unit(simulation), step / max_columns)
    num_columns = max(1, round(step / unit))
    rows = []
    for rank in range(simulation.plan.num_ranks):
        cells = ["."] * num_columns
        for label, start, end in _pieces(simulation, rank):
            # Columns whose middle lies in the piece; the small amount settles ties of rounding.
            first, last = round(start / unit + 1e-6), round(end / unit + 1e-6)
            cells[first:last] = [label] * (min(last, num_columns) - first)
        rows.append(cells)
    width = max(len(cell) for cells in rows for cell in cells)
    labels = ["S" + ",".join(map(str, simulation.plan.stages_of(rank))) for rank in range(len(rows))]
    margin = max(map(len, labels))
    return "\n".join(
        f"{label:{margin}}|{' '.join(cell.ljust(width) for cell in cells).rstrip()}"
        for label, cells in zip(labels, rows, strict=True)
    )


def _pieces(simulation: Simulation, rank: int) -> Iterator[tuple[str, float, float]]:
    """Label, start and end of what runs on a rank, the recompute inside a backward apart."""
    several = len(simulation.plan.stages_of(rank)) > 1
    for action, start, end, again in simulation.timeline[rank]:
        stage = str(action.stage) if several else ""
        if again and action.kind is not R:
            yield f"{stage}r{action.microbatch}", start, start + again
            start += again
        yield f"{stage}{action.kind}{action.microbatch}", start, end


def _common_unit(simulation: Simulation) -> float:
    """The largest time that divides all starts and ends, up to rounding."""
    tolerance = simulation.step_time * 1e-9
    unit = simulation.step_time
    for rank in range(simulation.plan.num_ranks):
        for _, start, end in _pieces(simulation, rank):
            for value in (start, end):
                larger, smaller = max(unit, value), min(unit, value)
                while smaller > tolerance:
                    rest = larger % smaller
                    larger, smaller = smaller, 0.0 if smaller - rest <= tolerance else rest
                unit = larger
    return unit
