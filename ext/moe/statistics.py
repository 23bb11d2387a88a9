"""Load of every expert and share of dropped routes, and the bias that evens the load out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ext.moe.routing import Selection


@dataclass(frozen=True)
class Load:
    """What a router did over some calls, on all ranks.

    Attributes:
        counts: routes that wanted each expert.
        num_dropped: routes that a capacity dropped.
    """

    counts: tuple[int, ...]
    num_dropped: int

    @property
    def dropped_share(self) -> float:
        """Dropped routes over all, 0 where there were none."""
        return self.num_dropped / max(sum(self.counts), 1)

    @property
    def max_over_mean(self) -> float:
        """The busiest expert's load over the mean; 1 is even, the number of experts the worst."""
        return max(self.counts) * len(self.counts) / max(sum(self.counts), 1)


class RouterStatistics:
    """Counts of one router since the last `take`; adds on the device, without a copy to the host."""

    def __init__(self, num_experts: int) -> None:
        self.num_calls = 0
        self._num_experts = num_experts
        self._totals: Tensor | None = None

    def add(self, selection: Selection) -> None:
        """One call of the router; not to be called for a re-run."""
        self.num_calls += 1
        kept = selection.is_kept.sum().view(1)
        row = torch.cat([selection.counts, kept])
        self._totals = row if self._totals is None else self._totals + row

    def take(self, device: torch.device) -> Tensor:
        """(num_experts + 1,) int64 counts of this rank and kept routes; counting starts again."""
        totals = self._totals
        self._totals, self.num_calls = None, 0
        return torch.zeros(self._num_experts + 1, dtype=torch.int64, device=device) if totals is None else totals


def take_loads(statistics: list[RouterStatistics], group: ProcessGroup | None, device: torch.device) -> list[Load]:
    """The loads of several routers, summed over ``group`` by one all-reduce. Collective over ``group``."""
    rows = [each.take(device) for each in statistics]
    flat = torch.cat(rows)
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    numbers = iter(flat.tolist())
    loads = []
    for row in rows:
        *counts, kept = (next(numbers) for _ in range(len(row)))
        loads.append(Load(tuple(counts), sum(counts) - kept))
    return loads


@torch.no_grad()
def update_bias(bias: Tensor, load: Load, rate: float) -> None:
    """Raise the bias of experts below the mean load by ``rate`` and lower the others', in place.

    The bias counts in the choice of experts, not in their weights: balance without an auxiliary loss
    (arXiv:2408.15664, section 3.1).
    """
    counts = torch.tensor(load.counts, dtype=bias.dtype, device=bias.device)
    bias.add_(rate * torch.sign(counts.mean() - counts))
