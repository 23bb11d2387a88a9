"""A small agreement between ranks, so that all of them go on alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def extremes(values: Tensor, group: ProcessGroup | None) -> tuple[list[int], list[int]]:
    """The largest and smallest of each value over the ranks, by one all-reduce and one copy to the host.

    Collective over ``group``, whose members all must call with as many values.

    Args:
        values: (n,) int64.
        group: None for a single rank, which needs no communication.
    """
    both = torch.cat([values, -values])
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    numbers = both.tolist()
    half = len(numbers) // 2
    return numbers[:half], [-number for number in numbers[half:]]
