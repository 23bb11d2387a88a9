"""What every rank did over a step, measured or simulated alike: spans of time, bubbles, mean times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ext.pipeline.actions import COMPUTE_KINDS, B, F, I, Kind, R, W
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.simulate import Simulation

LOAD = "LOAD"
"""Waiting for the data iterator."""
OPTIMIZER = "OPTIMIZER"
"""From the last action of a step to its end: reductions between replicas, clipping, the optimizer."""
IDLE = "idle"
"""Nothing to do; with a micro-batch where the rank waits for its message, which another rank has yet to make."""
NAMES = frozenset({*(kind.value for kind in Kind), LOAD, OPTIMIZER, IDLE})
COMPUTE_NAMES = frozenset(kind.value for kind in COMPUTE_KINDS)


class Span(NamedTuple):
    """Something that took time on one rank.

    Attributes:
        name: a kind of action, `LOAD`, `OPTIMIZER` or `IDLE`. F, B and I start when what they need is there; the wait
            before is a span of its own, RECV_F or RECV_B.
        stage: index of the model chunk.
        microbatch: -1 for what belongs to no micro-batch.
        start: seconds, on a clock that all ranks share.
        end: seconds.
        inline: a recompute inside the B or I that needs it.
    """

    name: str
    stage: int
    microbatch: int
    start: float
    end: float
    inline: bool = False

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def is_compute(self) -> bool:
        """Whether the device is busy with it; an inline recompute is counted with what it is inside of."""
        return self.name in COMPUTE_NAMES and not self.inline


@dataclass(frozen=True)
class StepTrace:
    """One step.

    Attributes:
        step: its number; the first of a run is 0.
        rows: spans of each rank, by rank, in order of their start.
    """

    step: int
    rows: tuple[tuple[Span, ...], ...]

    @cached_property
    def start(self) -> float:
        """When the first rank starts to compute, seconds."""
        return min((span.start for row in self.rows for span in row if span.is_compute), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last rank has computed, seconds; the optimizer comes after it."""
        return max((span.end for row in self.rows for span in row if span.is_compute), default=0.0)

    @property
    def pipeline_time(self) -> float:
        """Seconds from `start` to `end`; what the simulator calls step time."""
        return self.end - self.start

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the pipeline time in which a rank does not compute, by rank. Recompute counts as computing."""
        total = self.pipeline_time
        busy = [math.fsum(span.duration for span in row if span.is_compute) for row in self.rows]
        return tuple(1.0 - time / total if total else 0.0 for time in busy)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        return math.fsum(self.bubbles) / len(self.rows)


def simulated_trace(simulation: Simulation, seconds: float = 1.0, step: int = 0) -> StepTrace:
    """A simulation as a trace; ``seconds`` is the length of one unit of its time."""
    num_ranks = simulation.plan.num_ranks
    rows = tuple(tuple(_simulated_row(simulation, rank, seconds)) for rank in range(num_ranks))
    return with_idle(StepTrace(step, rows))


def _simulated_row(simulation: Simulation, rank: int, seconds: float) -> Iterator[Span]:
    free = 0.0
    for (stage, kind, microbatch), start, end, recompute in simulation.timeline[rank]:
        # A rank that is free and does not go on waits for the message that its next action needs.
        if start > free:
            wait = Kind.RECV_F if kind is F else Kind.RECV_B
            yield Span(wait.value, stage, microbatch, free * seconds, start * seconds)
        yield Span(kind.value, stage, microbatch, start * seconds, end * seconds)
        if recompute and kind is not R:
            yield Span(R.value, stage, microbatch, start * seconds, (start + recompute) * seconds, inline=True)
        free = end


def with_idle(trace: StepTrace) -> StepTrace:
    """The same step with its gaps as `IDLE`, and of every wait for a message the part before it was made.

    What is left of RECV_F and RECV_B is the time that messages take.
    """
    ready = _ready(trace)
    return StepTrace(trace.step, tuple(tuple(_row_with_idle(row, trace, ready)) for row in trace.rows))


def _row_with_idle(row: Sequence[Span], trace: StepTrace, ready: Mapping[_Message | None, float]) -> Iterator[Span]:
    free = trace.start
    for span in sorted(row, key=lambda span: span.start):
        if span.start > free and not span.inline:
            yield Span(IDLE, span.stage, -1, free, span.start)
        free = max(free, span.end)
        sent = min(max(span.start, ready.get(_message(span), span.start)), span.end)
        if sent > span.start:
            yield Span(IDLE, span.stage, span.microbatch, span.start, sent)
        if span.end > sent or sent == span.start:
            yield span._replace(start=sent)
    if row and trace.end > free:
        yield Span(IDLE, row[-1].stage, -1, free, trace.end)


class MeanTimes(NamedTuple):
    """Mean times of one stage for one micro-batch, seconds; 0 where the stage has no such action.

    Attributes:
        forward: of F.
        backward: of B, without a recompute inside it.
        input_grad: of I, without a recompute inside it.
        weight_grad: of W.
        recompute: of all recomputation of a micro-batch, early or inline.
    """

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    recompute: float


def mean_times(steps: Iterable[StepTrace], num_stages: int) -> tuple[MeanTimes, ...]:
    """Mean times over some steps, by stage."""
    durations: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in (row for trace in steps for row in trace.rows):
        inside: dict[tuple[int, int], float] = defaultdict(float)
        for span in row:
            if span.inline:
                inside[span.stage, span.microbatch] += span.duration
        for span in row:
            if span.is_compute:
                again = inside.get((span.stage, span.microbatch), 0.0) if span.name in (B.value, I.value) else 0.0
                durations[span.stage, span.name].append(span.duration - again)
        for (stage, _), again in inside.items():
            durations[stage, R.value].append(again)

    def mean(stage: int, kind: Kind) -> float:
        values = durations.get((stage, kind.value))
        return math.fsum(values) / len(values) if values else 0.0

    return tuple(MeanTimes(*(mean(stage, kind) for kind in (F, B, I, W, R))) for stage in range(num_stages))


def hand_over(steps: Iterable[StepTrace]) -> float:
    """Seconds from the end of an action to the start of one on another rank that waits for its message.

    Half the sum of the medians in both directions, so that clocks which differ between ranks cancel out.
    """
    late: dict[str, list[float]] = {Kind.RECV_F.value: [], Kind.RECV_B.value: []}
    for trace in steps:
        ready = _ready(trace)
        for span in (span for row in trace.rows for span in row):
            sent = ready.get(_message(span))
            if sent is not None and sent > span.start - _ROUNDING:
                late[span.name].append(span.end - sent)
    medians = [sorted(values)[len(values) // 2] for values in late.values() if values]
    return max(0.0, math.fsum(medians) / len(medians)) if medians else 0.0


_Message = tuple[str, int, int]
_ROUNDING = 1e-8


def _message(span: Span) -> _Message | None:
    """The message that a span waits for: its kind, the stage that makes it, its micro-batch."""
    if span.name == Kind.RECV_F.value:
        return F.value, span.stage - 1, span.microbatch
    return (B.value, span.stage + 1, span.microbatch) if span.name == Kind.RECV_B.value else None


def _ready(trace: StepTrace) -> dict[_Message | None, float]:
    """When each message was made, seconds; one between stages of the same rank too."""
    made = {F.value: F.value, B.value: B.value, I.value: B.value}
    return {
        (made[span.name], span.stage, span.microbatch): span.end
        for row in trace.rows
        for span in row
        if span.name in made
    }


def measured_costs(times: Sequence[MeanTimes], latency: float) -> Costs:
    """What the simulator takes for a plan with these times; sizes are left at their defaults."""
    stages = [
        StageCosts(
            forward=stage.forward,
            input_grad=stage.input_grad or stage.backward,
            weight_grad=stage.weight_grad,
            recompute=stage.recompute,
        )
        for stage in times
    ]
    return Costs(tuple(stages), latency=latency)
