"""What a run says about itself: progress lines, a JSON log, DeepSpeed's monitor, and the report at the end.

Everything here takes plain numbers and runs on rank 0 only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ext.core.errors import ConfigError


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step, as one line of the JSON log has it.

    Attributes:
        step: finished steps.
        loss: mean over the micro-batches of the last step.
        validation_loss: where the step ended with an evaluation.
        tokens_per_s: of all ranks together, over the steps since the line before, without evaluation and checkpoints.
        learning_rate: of the last step.
        step_time_s: of one step, mean since the line before.
        bubble: measured share of the pipeline's time that was idle.
        memory_gib: peak of each stage so far.
        plan_hash: which plan ran.
    """

    step: int
    loss: float
    validation_loss: float | None
    tokens_per_s: float
    learning_rate: float
    step_time_s: float
    bubble: float | None
    memory_gib: tuple[float, ...]
    plan_hash: str | None

    def line(self, num_steps: int, remaining_s: float) -> str:
        """For people."""
        validation = "" if self.validation_loss is None else f"  validation loss {self.validation_loss:.4f}"
        return (
            f"step {self.step:>{len(str(num_steps))}}/{num_steps}  loss {self.loss:.4f}{validation}  "
            f"{self.tokens_per_s:,.0f} tokens/s  ETA {duration(remaining_s)}"
        )

    def events(self, num_samples: int) -> list[tuple[str, float, int]]:
        """For DeepSpeed's monitor, which reports both losses and the learning rate itself; the hash's first 24 bits."""
        values: dict[str, float | None] = {
            "tokens_per_s": self.tokens_per_s,
            "step_time_s": self.step_time_s,
            "bubble": self.bubble,
            "plan_hash": None if self.plan_hash is None else int(self.plan_hash[:6], 16),
            **{f"memory_gib_stage_{stage}": gib for stage, gib in enumerate(self.memory_gib)},
        }
        return [(f"Train/Samples/{name}", value, num_samples) for name, value in values.items() if value is not None]


class JsonLog:
    """One JSON object per line, appended and flushed; without a path it swallows everything.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = None if path is None else path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--log-json: {path} cannot be written: {error.strerror}") from error

    def write(self, progress: Progress) -> None:
        if self._file is not None:
            self._file.write(json.dumps(asdict(progress)) + "\n")
            self._file.flush()

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class Summary:
    """What is known at the end of a run; None where it was not measured.

    Attributes:
        num_steps: finished steps, those before a resume included.
        schedule: name of the schedule.
        plan_hash: which plan ran.
        losses: step and loss, of this process.
        validation_losses: step and loss, of this process.
        tokens_per_s: of all ranks together.
        step_time_s: measured.
        simulated_step_time_s: what the plan promises for the times its parts took.
        bubble: measured share of the pipeline's time that was idle.
        simulated_bubble: the same in the simulation.
        memory_gib: peak of each stage.
        memory_kind: what was measured.
        live_bytes: of each stage, states and activations as measured in the first step and as predicted before it;
            empty where nobody asked.
        recomputed: of each stage, what its windows carried; empty where no policy decides about units.
        checkpoint: the last one written.
        resolved_config: the file.
    """

    num_steps: int
    schedule: str
    plan_hash: str | None
    losses: Sequence[tuple[int, float]]
    validation_losses: Sequence[tuple[int, float]]
    tokens_per_s: float | None
    step_time_s: float | None
    simulated_step_time_s: float | None
    bubble: float | None
    simulated_bubble: float | None
    memory_gib: tuple[float, ...]
    memory_kind: str
    live_bytes: Sequence[tuple[int | None, int]]
    recomputed: Sequence[str]
    checkpoint: Path | None
    resolved_config: Path

    def show(self, console: Console) -> None:
        """Print it as a small table."""
        table = Table(title=f"{self.num_steps} steps under {self.schedule}", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")
        for name, text in self._rows():
            table.add_row(name, text)
        console.print(table)

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "loss", _change(self.losses)
        yield "validation loss", _change(self.validation_losses)
        yield "throughput", _number(self.tokens_per_s, "{:,.0f} tokens/s")
        yield "step time, measured / simulated", _pair(self.step_time_s, self.simulated_step_time_s, "{:.3f} s")
        yield "bubble, measured / simulated", _pair(self.bubble, self.simulated_bubble, "{:.1%}")
        yield f"peak {self.memory_kind} per stage", ", ".join(f"{gib:.2f}" for gib in self.memory_gib) + " GiB"
        if self.live_bytes:
            pairs = [_pair(_mib(measured), _mib(predicted), "{:,.1f}") for measured, predicted in self.live_bytes]
            yield "held per stage, measured / predicted", ", ".join(pairs) + " MiB"
        if self.recomputed:
            yield "recomputed per micro-batch, planned / measured", "\n".join(self.recomputed)
        yield "plan", self.plan_hash or "-"
        yield "checkpoint", str(self.checkpoint or "-")
        yield "resolved config", str(self.resolved_config)


def median(values: Sequence[float]) -> float | None:
    """The middle value, or None of none."""
    return sorted(values)[len(values) // 2] if values else None


def duration(seconds: float) -> str:
    """Such as 42s, 3m07s, 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _pair(measured: float | None, simulated: float | None, form: str) -> str:
    return f"{_number(measured, form)} / {_number(simulated, form)}"


def _change(values: Sequence[tuple[int, float]]) -> str:
    if not values:
        return "-"
    (first_step, first), (last_step, last) = values[0], values[-1]
    return f"{first:.4f} (step {first_step}) -> {last:.4f} (step {last_step})"
