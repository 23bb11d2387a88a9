"""Embedding, head and cross entropy with the vocabulary shared over ranks; no rank ever holds whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.linear import column_parallel_linear, sum_output


class VocabularyRange:
    """The token ids of one rank: ``first`` to ``last`` - 1.

    Every rank has ``rows`` rows, so that weights have one shape everywhere; where the ranks do not divide the
    vocabulary, rows behind its end are never read and have zero gradients.
    """

    def __init__(self, vocab_size: int, group: TensorParallelGroup) -> None:
        self.group = group
        self.rows = -(-vocab_size // group.size)
        self.first = min(group.rank * self.rows, vocab_size)
        self.last = min(self.first + self.rows, vocab_size)

    @property
    def size(self) -> int:
        """Token ids of this rank."""
        return self.last - self.first


class VocabParallelEmbedding(nn.Module):
    """Token ids ``(...)`` to vectors ``(..., hidden)``, and with the same weight vectors to this rank's logits.

    Forward, collective over the group: one all-reduce of the vectors. `logits`: one of their gradient, in backward.

    Args:
        weight: the whole table ``(vocabulary, hidden)``, the same on every rank; only this rank's rows are kept.
        group: ranks that share it.
    """

    def __init__(self, weight: Tensor, group: TensorParallelGroup) -> None:
        super().__init__()
        self.group, self.range = group, VocabularyRange(weight.shape[0], group)
        rows = weight.new_zeros(self.range.rows, weight.shape[1])
        rows[: self.range.size] = weight.detach()[self.range.first : self.range.last]
        self.weight = nn.Parameter(rows)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.range.first) | (tokens >= self.range.last)
        mine = (tokens - self.range.first).masked_fill(elsewhere, 0)
        vectors = functional.embedding(mine, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return _Sum.apply(vectors, self.group)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """``(..., hidden)`` to ``(..., token ids of this rank)``; as many as the range has, which may differ."""
        return column_parallel_linear(hidden, self.weight[: self.range.size], None, self.group)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocabulary: VocabularyRange) -> Tensor:
    """Mean cross entropy over all labels, the same on every rank; in fp32, or fp64 where the logits are.

    Forward, collective over the group: a maximum and a sum, of one and two numbers per label; none in backward.

    Args:
        logits: ``(..., token ids of this rank)``.
        labels: ``(...)`` token ids.
        vocabulary: which ids are this rank's.
    """
    flat = logits.flatten(0, -2)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return _CrossEntropy.apply(flat, labels.flatten(), vocabulary)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularyRange) -> Tensor:
        group = vocabulary.group
        lowest = logits.new_full((logits.shape[0], 1), float("-inf"))
        top = group.all_reduce(torch.cat([logits, lowest], 1).amax(1), dist.ReduceOp.MAX)
        powers = (logits - top.unsqueeze(1)).exp()
        mine = (labels >= vocabulary.first) & (labels < vocabulary.last)
        rows = mine.nonzero().squeeze(1)
        columns = labels[rows] - vocabulary.first
        wanted = torch.zeros_like(top).index_copy_(0, rows, logits[rows, columns] - top[rows])
        sums = group.all_reduce(torch.stack([powers.sum(1), wanted]))
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(1)), rows, columns)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shares, rows, columns = ctx.saved_tensors
        logits_grad = shares.clone()
        logits_grad[rows, columns] -= 1
        return logits_grad.mul_(grad / shares.shape[0]), None, None


class _Sum(torch.autograd.Function):
    """Sum over the group; backward the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        return sum_output(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
