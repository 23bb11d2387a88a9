"""Which tokens a step sees: a function of seed and step alone, so that a resumed run sees what it would have seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ext.core.errors import DataError
from gpt.corpus import Range

CHECKED_TOKENS = 2**28
"""How many tokens are searched for ids outside the vocabulary before training starts."""


@dataclass(frozen=True)
class BatchShape:
    """How many windows a step takes, and in what order ranks and micro-batches take them."""

    sequence_length: int
    micro_batch_size: int
    num_microbatches: int
    data_parallel_size: int = 1

    @property
    def windows_per_step(self) -> int:
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @property
    def tokens_per_step(self) -> int:
        return self.windows_per_step * self.sequence_length


@dataclass(frozen=True)
class Sampler:
    """Cuts tokens into windows of `sequence_length` and deals them out, each window once per epoch, in random order.

    The windows of a step do not depend on how the ranks split them.
    """

    tokens: Range
    shape: BatchShape
    data_parallel_rank: int
    seed: int

    @property
    def num_windows(self) -> int:
        return (len(self.tokens) - 1) // self.shape.sequence_length

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of one step for this rank: tokens and labels, each `(micro_batch, sequence)` of int64."""
        shape = self.shape
        for microbatch in range(shape.num_microbatches):
            first = step * shape.windows_per_step + shape.micro_batch_size * (
                microbatch * shape.data_parallel_size + self.data_parallel_rank
            )
            windows = torch.stack([self._window(first + i) for i in range(shape.micro_batch_size)])
            yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, number: int) -> Tensor:
        """The window dealt out as the `number`-th since step 0, with one token more for the last label."""
        epoch, position = divmod(number, self.num_windows)
        index = int(_order(self.num_windows, self.seed, epoch)[position])
        length = self.shape.sequence_length
        return torch.from_numpy(self.tokens.read(index * length, length + 1).astype(np.int64))


@lru_cache(maxsize=4)
def _order(num_windows: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, because NumPy promises its numbers for every release; those of Generator may change.
    return np.random.RandomState([seed % 2**32, epoch]).permutation(num_windows)


def check(tokens: Range, name: str, sequence_length: int, vocab_size: int) -> None:
    """Refuse tokens that cannot fill one window or do not fit the vocabulary.

    Only the first `CHECKED_TOKENS` are searched.

    Raises:
        DataError: too few tokens, or an id beyond the vocabulary.
    """
    if len(tokens) < sequence_length + 1:
        raise DataError(
            f"the {name} data has {len(tokens)} tokens, one window needs {sequence_length + 1}. "
            f"Give more data or a smaller --seq-length."
        )
    for start in range(0, min(len(tokens), CHECKED_TOKENS), 2**24):
        ids = tokens.read(start, 2**24)
        if ids.max() >= vocab_size or ids.min() < 0:
            wrong = int(ids[(ids >= vocab_size) | (ids < 0)][0])
            raise DataError(
                f"the {name} data has the token {wrong}, the vocabulary has {vocab_size} (0 to {vocab_size - 1}). "
                f"Give the --tokenizer the data was made with, or --vocab-size."
            )
