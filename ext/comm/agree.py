"""A small agreement between ranks, so that all of them go on alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

DIRECT_RANKS = 16
"""On CPU so many ranks tell each other directly, in one hop; an all-reduce of gloo's goes round all of them twice."""


def extremes(values: Tensor, group: ProcessGroup | None) -> tuple[list[int], list[int]]:
    """The largest and smallest of each value over the ranks, by one collective and one copy to the host.

    Collective over ``group``, whose members all must call with as many values.

    Args:
        values: (n,) int64.
        group: None for a single rank, which needs no communication.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if 1 < size <= DIRECT_RANKS and values.device.type == "cpu":
        everyone = values.new_empty(size, values.numel())
        dist.all_to_all_single(everyone, values.expand(size, -1).contiguous(), group=group)
        return everyone.amax(0).tolist(), everyone.amin(0).tolist()
    both = torch.cat([values, -values])
    if size > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    numbers = both.tolist()
    half = len(numbers) // 2
    return numbers[:half], [-number for number in numbers[half:]]
