"""Records when the actions of a training step run on this rank, at a cost of some microseconds per action."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ext.core.replay import is_replaying
from ext.pipeline.actions import B, I, Kind, R
from ext.pipeline.trace import OPTIMIZER, Span

KEPT_STEPS = 16


class Clock(Protocol):
    """Marks moments cheaply and tells later when they were."""

    def mark(self) -> Any:
        """This moment, in whatever form."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The moments of marks, in seconds of this host's wall clock."""
        ...


class HostClock:
    """The host's clock, for devices that compute when the host does."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        offset = _wall_offset()
        return [mark + offset for mark in marks]


class CudaClock:
    """Events on the current stream: when the device gets there, not when the host says so."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Waits for the device."""
        now = self.mark()
        now.synchronize()
        wall = time.time()
        return [wall - mark.elapsed_time(now) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> Clock:
    """The clock that times what runs on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class RecordedStep:
    """What this rank did in one step.

    Attributes:
        step: its number.
        spans: in order of their end, on the wall clock of this host.
        start: of the whole step, data and optimizer included; seconds on the same clock.
        end: likewise.
    """

    step: int
    spans: tuple[Span, ...]
    start: float
    end: float


class _Marked(NamedTuple):
    name: str
    stage: int
    microbatch: int
    start: Any
    end: Any
    inline: bool


@dataclass
class _Step:
    number: int
    start: Any
    spans: list[_Marked] = field(default_factory=list)
    actions_done: tuple[int, Any] | None = None
    end: Any = None


class Recorder:
    """Spans of the last steps of one rank.

    Outside of `step`, as in evaluation, and where ``enabled`` is False, everything passes through unrecorded.

    Args:
        clock: see `clock_for`.
        keep: steps that are kept.
    """

    def __init__(self, clock: Clock, keep: int = KEPT_STEPS) -> None:
        self.enabled = True
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=keep)
        self._step: _Step | None = None
        self._action: Kind | None = None
        self._start: Any = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a whole step. One that raises is forgotten."""
        if not self.enabled:
            yield
            return
        self._step = step = _Step(number, self._clock.mark())
        try:
            yield
        finally:
            self._step = None
        step.end = self._clock.mark()
        if step.actions_done is not None:
            stage, start = step.actions_done
            step.spans.append(_Marked(OPTIMIZER, stage, -1, start, step.end, False))
        self._steps.append(step)

    @contextmanager
    def action(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Around an action. It starts where the last `waiting` inside it ends."""
        step = self._step
        if step is None:
            yield
            return
        self._action, self._start = kind, self._clock.mark()
        yield
        step.spans.append(_Marked(kind.value, stage, microbatch, self._start, self._clock.mark(), False))
        self._action = None

    @contextmanager
    def waiting(self, name: str, stage: int, microbatch: int) -> Iterator[None]:
        """Around a wait at the beginning of an action, for a message or for data."""
        step = self._step
        if step is None:
            yield
            return
        start = self._clock.mark()
        yield
        self._start = self._clock.mark()
        step.spans.append(_Marked(name, stage, microbatch, start, self._start, False))

    def actions_done(self, stage: int) -> None:
        """What follows in this step is reductions and the optimizer."""
        if self._step is not None:
            self._step.actions_done = stage, self._clock.mark()

    def with_reruns(self, layer: Callable[[Any], Any], stage: int, microbatch: int) -> Callable[[Any], Any]:
        """The layer, whose re-runs inside a B or I are recorded."""
        if self._step is None:
            return layer

        def call(inputs: Any) -> Any:
            if not is_replaying():
                return layer(inputs)
            with self.rerun(stage, microbatch):
                return layer(inputs)

        return call

    @contextmanager
    def rerun(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around a recompute, which is recorded where it stands inside a B or I."""
        step = self._step
        if step is None or self._action not in (B, I):
            yield
            return
        start = self._clock.mark()
        try:
            yield
        finally:  # torch ends a re-run by an exception as soon as it has what it needs
            step.spans.append(_Marked(R.value, stage, microbatch, start, self._clock.mark(), True))

    def recorded(self, last: int | None = None) -> list[RecordedStep]:
        """The kept steps, oldest first, or the ``last`` of them. Waits for the device."""
        steps = list(self._steps)
        if last is not None:
            steps = steps[max(0, len(steps) - last) :]
        marks = [mark for step in steps for mark in (step.start, step.end)]
        marks += [mark for step in steps for span in step.spans for mark in (span.start, span.end)]
        seconds = iter(self._clock.seconds(marks))
        whole = [(next(seconds), next(seconds)) for _ in steps]
        return [
            RecordedStep(
                step.number,
                tuple(
                    Span(span.name, span.stage, span.microbatch, next(seconds), next(seconds), span.inline)
                    for span in step.spans
                ),
                *times,
            )
            for step, times in zip(steps, whole, strict=True)
        ]

    def clear(self) -> None:
        """Forget all steps, as after a change of the plan."""
        self._steps.clear()


def _wall_offset(tries: int = 5) -> float:
    """Wall clock minus `time.perf_counter`, from the try that was interrupted least."""
    best = (float("inf"), 0.0)
    for _ in range(tries):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        best = min(best, (after - before, wall - (before + after) / 2))
    return best[1]
