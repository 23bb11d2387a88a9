"""The recorder: which spans it keeps, and what it costs where it is off."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ext.pipeline.actions import B, F, I, Kind, R
from ext.pipeline.trace import Span
from ext.recompute.regions import DroppedLayer, MicrobatchRegions
from ext.runtime.recorder import HostClock, Recorder, clock_for


class Ticks:
    """A clock that goes on by one at every look; its marks are tuples, to be told later."""

    def __init__(self) -> None:
        self.looks = 0

    def mark(self) -> tuple[int]:
        self.looks += 1
        return (self.looks,)

    def seconds(self, marks: Sequence[tuple[int]]) -> list[float]:
        return [100.0 + mark[0] for mark in marks]


def test_an_action_starts_when_what_it_waits_for_is_there():
    recorder = Recorder(Ticks())
    with recorder.step(5):  # 1
        with recorder.action(F, 2, 3):  # 2
            with recorder.waiting("LOAD", 2, 3):  # 3, 4
                pass
            with recorder.waiting("RECV_F", 2, 3):  # 5, 6
                pass
        # 7
        with recorder.action(Kind.SEND_F, 2, 3):  # 8, 9
            pass
        recorder.actions_done(2)  # 10
    # 11
    (step,) = recorder.recorded()
    assert (step.step, step.start, step.end) == (5, 101, 111)
    assert step.spans == (
        Span("LOAD", 2, 3, 103, 104),
        Span("RECV_F", 2, 3, 105, 106),
        Span("F", 2, 3, 106, 107),
        Span("SEND_F", 2, 3, 108, 109),
        Span("OPTIMIZER", 2, -1, 110, 111),
    )


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", [B, I])
def test_reruns_are_recorded_inside_a_backward_and_not_inside_their_own_action(kind, early):
    recorder = Recorder(HostClock())
    x = torch.ones(2, requires_grad=True)
    regions = MicrobatchRegions()
    with recorder.step(0):
        with recorder.action(F, 1, 0):
            out = DroppedLayer(recorder.with_reruns(torch.sin, 1, 0), regions)(x)
        if early:
            with recorder.action(R, 1, 0):
                regions.recompute()
        with recorder.action(kind, 1, 0), regions.backward():
            out.sum().backward()
    spans = recorder.recorded()[0].spans
    assert [span.name for span in spans] == ["F", "R", kind.value]
    assert [span.inline for span in spans] == [False, not early, False]
    backward, again = spans[2], spans[1]
    assert (backward.start < again.start < again.end < backward.end) == (not early)


def test_only_the_last_steps_are_kept_and_a_failed_one_is_not():
    recorder = Recorder(Ticks(), keep=3)
    for number in range(5):
        with recorder.step(number), recorder.action(F, 0, 0):
            pass
    assert [step.step for step in recorder.recorded()] == [2, 3, 4]
    assert [step.step for step in recorder.recorded(last=2)] == [3, 4]
    assert recorder.recorded(last=0) == []
    with pytest.raises(KeyError), recorder.step(5), recorder.action(F, 0, 0):
        raise KeyError
    with recorder.step(6), recorder.action(F, 0, 1):
        pass
    assert [(step.step, len(step.spans)) for step in recorder.recorded()] == [(3, 1), (4, 1), (6, 1)]
    recorder.clear()
    assert recorder.recorded() == []


def test_nothing_is_looked_up_where_it_is_off_or_outside_of_a_step():
    clock = Ticks()
    recorder = Recorder(clock)

    def everything() -> None:
        with recorder.action(F, 0, 0), recorder.waiting("RECV_F", 0, 0):
            pass
        recorder.actions_done(0)
        assert recorder.with_reruns(torch.sin, 0, 0) is torch.sin

    everything()
    recorder.enabled = False
    with recorder.step(0):
        everything()
    assert clock.looks == 0
    assert recorder.recorded() == []


def test_host_clock_tells_wall_time_in_order():
    import time

    clock = clock_for(torch.device("cpu"))
    before, marks = time.time(), [clock.mark()]
    time.sleep(0.001)  # wall times resolve a quarter of a microsecond
    marks.append(clock.mark())
    after = time.time()
    first, second = clock.seconds(marks)
    assert first < second
    assert before - 0.1 < first < after + 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_clock_times_the_device():
    clock = clock_for(torch.device("cuda"))
    x = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    marks = [clock.mark()]
    for _ in range(20):
        x = x @ x
    marks.append(clock.mark())
    start, end = clock.seconds(marks)
    begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        x = x @ x
    finish.record()
    finish.synchronize()
    assert end - start == pytest.approx(begin.elapsed_time(finish) / 1e3, rel=0.5)
