"""The ranks that share a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ext.core.errors import ConfigError


@dataclass(frozen=True)
class TensorParallelGroup:
    """A process group with this rank's place in it; `alone` is a group of one, which communicates nothing.

    Attributes:
        group: of torch.distributed; None for one rank.
        rank: of this process in the group.
        size: number of ranks.
    """

    group: ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> TensorParallelGroup:
        """Local, but every member must use the layers in the same order."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    def alone(cls) -> TensorParallelGroup:
        return cls(None, 0, 1)

    def start_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work | None:
        """Reduce ``tensor`` in place; it must not be touched until the result was waited for. Collective."""
        if self.size == 1:
            return None
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=True)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The same with the wait. Collective."""
        work = self.start_all_reduce(tensor, op)
        if work is not None:
            work.wait()
        return tensor

    def shard(self, tensor: Tensor, dim: int = 0, blocks: int = 1) -> Tensor:
        """This rank's part of a whole tensor, as a copy.

        Args:
            tensor: the whole.
            dim: along which it is cut.
            blocks: equal blocks along ``dim`` that are cut one by one (3 for queries, keys and values in one weight).

        Raises:
            ConfigError: it cannot be cut evenly.
        """
        width = tensor.shape[dim]
        if width % (self.size * blocks):
            raise ConfigError(
                f"{width} rows or columns in {blocks} block(s) cannot be shared evenly by {self.size} tensor-parallel "
                "ranks. Choose a width that they divide, or fewer ranks."
            )
        parts = [block.chunk(self.size, dim)[self.rank] for block in tensor.detach().chunk(blocks, dim)]
        return torch.cat(parts, dim)
