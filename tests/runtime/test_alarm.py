"""An error of some ranks is heard by all, until it is settled."""

import time

import pytest
import torch.distributed as dist

from ext.core.errors import CommunicationError, RoutingError
from ext.runtime import alarm as alarm_module
from ext.runtime.alarm import EXIT_ALARM, Alarm
from ext.runtime.guard import FailureGuard
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


def _heard(alarm: Alarm, seconds: float = 10.0) -> BaseException | None:
    """What the alarm raises in the next seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            alarm.raise_if_rung()
        except (RoutingError, CommunicationError) as error:
            return error
        time.sleep(0.05)
    return None


def _running(rank: int, world_size: int) -> tuple[list[str], int]:
    ends: list[int] = []
    alarm_module.PAUSE_S, alarm_module.TELL_S, alarm_module.GRACE_S = 0.1, 1.5, 2.0
    alarm = Alarm(end=ends.append)
    guard = FailureGuard()
    guard.alarm = alarm
    texts = []
    for error in (RoutingError("a: b"), KeyError("c")):
        found: BaseException | None = error
        if rank == 0:
            alarm.ring(error)
        else:
            found = _heard(alarm)
        guard.start_step()
        with pytest.raises((RoutingError, CommunicationError, KeyError)) as raised:
            guard.agree(found)  # settles it
        texts.append(str(raised.value))
        dist.barrier()
        time.sleep(0.5)
        assert _heard(alarm, 0.2) is None
    dist.barrier()
    if rank == 0:
        alarm.ring(RoutingError("nobody comes"))
    until = time.monotonic() + 10
    while not ends and time.monotonic() < until:
        time.sleep(0.1)
    return texts, ends[0]


def test_a_rank_that_runs_raises_the_same_error_and_an_agreement_settles_it():
    results = run_ranks(_running, 2, timeout=40)
    assert [code for _, code in results] == [EXIT_ALARM] * 2
    assert results[0][0][0] == results[1][0][0] == "a: b"
    assert "KeyError" in results[1][0][1]
