"""An error of some ranks ends all, unless they come together over it."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ext.core.errors import CommunicationError, RoutingError
from ext.runtime import alarm as alarm_module
from ext.runtime.alarm import EXIT_ALARM, Alarm
from ext.runtime.guard import FailureGuard
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


def _run(rank: int, world_size: int, folder: str) -> tuple[list[str], list[int]]:
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    alarm_module.PAUSE_S, alarm_module.TELL_S, alarm_module.GRACE_S = 0.1, 0.5, 1.0
    ends: list[int] = []
    guard = FailureGuard()
    guard.alarm = alarm = Alarm(end=ends.append)
    texts = []
    for error in (RoutingError("a: b"), KeyError("c")):
        guard.start_step()
        with pytest.raises((RoutingError, CommunicationError, KeyError)) as raised:
            guard.agree(error if rank == 0 else None)  # settles it
        texts.append(str(raised.value))
    time.sleep(2.0)
    settled = list(ends)
    dist.barrier()
    if rank == 0:
        alarm.ring(RoutingError("nobody comes: why"))
    until = time.monotonic() + 20
    while not ends and time.monotonic() < until:
        time.sleep(0.1)
    dist.barrier()
    assert settled == []
    return texts, ends


def test_an_alarm_that_nobody_settles_ends_every_rank_by_name(tmp_path):
    results = run_ranks(_run, 2, str(tmp_path), timeout=40)
    assert results[0][0][0] == results[1][0][0] == "a: b"
    assert "rank 0 failed: KeyError: 'c'" in results[1][0][1]
    assert [ends for _, ends in results] == [[EXIT_ALARM]] * 2
    for rank in range(2):
        shown = Path(tmp_path, f"stderr{rank}").read_text()
        assert f"rank {rank} stops, as rank 0 failed: RoutingError: nobody comes: why\n" in shown
