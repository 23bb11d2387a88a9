"""Which window carried how much: counted while an engine runs, and set beside what the tables predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ext.recompute.problem import Solution, StageProblem
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.windows import ON_DEMAND


class ByteReserve:
    """Bytes that early recomputes of one stage may hold at once, beyond what is kept.

    What runs on demand is counted, too, but never refused: without it there is no backward.

    Attributes:
        limit: the most that early recomputes may bring ``live`` to; None for no limit.
        live: bytes of recomputed values that are held now.
        peak: the most there ever was of them.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.live = 0
        self.peak = 0

    def allows(self, num_bytes: int) -> bool:
        """Whether an early recompute of ``num_bytes`` keeps within the limit."""
        return self.limit is None or self.live + num_bytes <= self.limit

    def take(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def give(self, num_bytes: int) -> None:
        self.live -= num_bytes


@dataclass
class WindowUse:
    """Recomputes that ran in one window.

    Attributes:
        units: how many.
        bytes: that they brought back.
        timings: functions that give the seconds of each; on a device they are known later only.
    """

    units: int = 0
    bytes: int = 0
    timings: list[Callable[[], float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time of these recomputes; waits for the device."""
        return sum(timing() for timing in self.timings)


class RecomputeReport:
    """What one stage recomputed, by window, over any number of micro-batches.

    Attributes:
        windows: what ran, by the name of the window; `ON_DEMAND` is the exposed part.
        saved_bytes: that forwards dropped, over all micro-batches.
        microbatches: micro-batches that ran a forward.
        skipped: early recomputes that the byte reserve put off until they were asked for.
        repeated: recomputes of something that had been recomputed and freed before (a second backward).
    """

    def __init__(self) -> None:
        self.windows: dict[str, WindowUse] = {}
        self.saved_bytes = 0
        self.microbatches = 0
        self.skipped = 0
        self.repeated = 0

    def add(self, window: str, num_bytes: int, timing: Callable[[], float]) -> None:
        """Counts one recompute."""
        use = self.windows.setdefault(window, WindowUse())
        use.units += 1
        use.bytes += num_bytes
        use.timings.append(timing)

    @property
    def num_recomputed(self) -> int:
        """Units recomputed so far."""
        return sum(use.units for use in self.windows.values())

    def measured(self) -> dict[str, float]:
        """Seconds by window, per micro-batch."""
        return {name: use.seconds / max(1, self.microbatches) for name, use in self.windows.items()}

    def rows(self, problem: StageProblem, solution: Solution) -> list[dict[str, float | str]]:
        """One row per window: units, bytes and seconds per micro-batch, predicted and measured.

        ``exposed`` predicts what of the window's time falls on micro-batches or layers that lack it.
        """
        predicted = predicted_windows(problem, solution)
        names = dict.fromkeys([*(w.name for w in problem.windows), ON_DEMAND, *predicted, *self.windows])
        rows: list[dict[str, float | str]] = []
        for name in names:
            plan = predicted.get(name, PredictedUse())
            use = self.windows.get(name, WindowUse())
            per = max(1, self.microbatches)
            rows.append(
                {
                    "window": name,
                    "units_planned": plan.units,
                    "units": use.units / per,
                    "bytes_planned": plan.bytes,
                    "bytes": use.bytes / per,
                    "seconds_planned": plan.seconds,
                    "exposed_planned": plan.exposed,
                    "seconds": use.seconds / per,
                }
            )
        return rows


@dataclass
class PredictedUse:
    """What tables give to one window, per micro-batch of the stage."""

    units: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


def predicted_windows(problem: StageProblem, solution: Solution) -> dict[str, PredictedUse]:
    """The tables' decisions summed by window."""
    predicted: dict[str, PredictedUse] = {}
    for number, table in enumerate(solution.tables):
        for unit in problem.layer.units:
            decision = table[unit.name]
            if decision in (KEEP, UNUSED):
                continue
            use = predicted.setdefault(decision, PredictedUse())
            use.units += 1
            use.bytes += unit.bytes
            use.seconds += unit.time
            window = problem.window.get(decision)
            if window is None:
                use.exposed += unit.time
            else:
                lacking = not window.last_layer and number == len(solution.tables) - 1
                use.exposed += unit.time * (1.0 if lacking else window.exposed)
    return predicted


def summary(rows: Sequence[Mapping[str, float | str]]) -> str:
    """The rows of `RecomputeReport.rows` as a table for people; times in milliseconds, sizes in MiB."""
    lines = [f"{'window':<8}{'units':>12}{'MiB':>18}{'ms':>20}{'exposed ms':>12}"]
    for row in rows:
        units, size, time = (
            _both(row, key, scale) for key, scale in (("units", 1), ("bytes", 2**20), ("seconds", 1e-3))
        )
        lines.append(f"{row['window']:<8}{units:>12}{size:>18}{time:>20}{float(row['exposed_planned']) * 1e3:>12.2f}")
    return "\n".join(lines)


def _both(row: Mapping[str, float | str], key: str, scale: float) -> str:
    planned, measured = (float(row[name]) / scale for name in (f"{key}_planned", key))
    return f"{planned:.4g}/{measured:.4g}"
