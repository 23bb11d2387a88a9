"""run_ranks gives results by rank, names the rank that failed and the stack a rank hung in."""

import time

import pytest
import torch
import torch.distributed as dist

from ext.core.errors import ConfigError
from ext.testing.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.dist


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value.item()


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ConfigError("first problem", "second problem")


def _hang_here(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def test_results_come_by_rank():
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_failing_rank_is_named_with_its_exception():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_raise_on_one, 2)
    assert isinstance(failed.value.errors[1], ConfigError)
    assert "first problem\nsecond problem" in failed.value.failures[1]


def test_a_hanging_rank_is_ended_and_its_stack_shown():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_hang_here, 2, timeout=3)
    assert "_hang_here" in failed.value.failures[0]
