"""Ranks fail with one text and stop at one step."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from ext.core.errors import DataError
from ext.testing.ranks import run_ranks
from gpt.together import StopSignal, from_first, together

pytestmark = pytest.mark.dist


def _fail_on_one(rank):
    if rank == 1:
        raise DataError("only rank 1 cannot read it")
    return rank


def _ranks(rank, world_size):
    seen = [from_first(lambda: dist.get_rank() + 40), together(lambda: rank)]
    try:
        together(lambda: _fail_on_one(rank))
    except DataError as error:
        seen.append(str(error))
    stop = StopSignal()
    seen.append(stop.agreed())
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as the launcher does
    seen.append(stop.agreed())
    stop.finish()
    return seen


def _stuck(rank, world_size, finishes):
    StopSignal.GRACE_S = 1.0
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    if finishes:
        stop.finish()
    time.sleep(3)


def test_errors_results_and_signals_reach_every_rank():
    say = "only rank 1 cannot read it"
    assert run_ranks(_ranks, 2) == [[40, 0, say, 0, signal.SIGTERM], [40, 1, say, 0, signal.SIGTERM]]


def test_a_rank_that_is_stuck_after_a_signal_ends_itself():
    assert run_ranks(_stuck, 1, True) == [None]
    with pytest.raises(AssertionError, match=r"exit code 143|143"):
        run_ranks(_stuck, 1, False)
