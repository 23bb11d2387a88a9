"""Megatron's pairs of .bin and .idx files, through megatron-core's own reader and builder."""

from __future__ import annotations

import importlib.util
import os
import struct
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ext.core.errors import ConfigError, DataError
from gpt.corpus import Corpus
from gpt.tokenizer import Tokenizer


@dataclass(frozen=True)
class IndexedTokens:
    """All sequences of a pair in the order of the .bin file, read through its memory map."""

    reader: Any
    dtype: Any
    length: int

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> np.ndarray:
        return self.reader.read(dtype=self.dtype, count=count, offset=start * np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class IndexedPair:
    """A pair whose files exist."""

    prefix: Path

    @classmethod
    def find(cls, prefix: Path, bin_path: Path, idx_path: Path) -> IndexedPair:
        """The pair `prefix`.bin and `prefix`.idx, if both are there and not empty."""
        require_megatron("a pair of .bin and .idx files")
        for path in (bin_path, idx_path):
            if not path.is_file() or not os.access(path, os.R_OK) or path.stat().st_size == 0:
                raise DataError(f"{path} is missing, empty or not readable; a pair is {bin_path} and {idx_path}")
        return cls(prefix)

    def load(self, tokenizer: Tokenizer) -> Corpus:
        dataset = _open(self.prefix)
        index = dataset.index
        itemsize = np.dtype(index.dtype).itemsize
        length = int(index.sequence_lengths.sum(dtype=np.int64))
        size = Path(f"{self.prefix}.bin").stat().st_size
        if size != length * itemsize:
            raise DataError(
                f"{self.prefix}.bin has {size} bytes, its index says {length * itemsize}: the pair is incomplete"
            )
        first_sequences = index.document_indices[:-1]
        starts = index.sequence_pointers[first_sequences[first_sequences < len(index.sequence_pointers)]] // itemsize
        return Corpus.split(IndexedTokens(dataset.bin_reader, index.dtype, length), starts)


def require_megatron(purpose: str) -> None:
    """Raises ConfigError unless megatron-core can be imported."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ConfigError(f"{purpose} needs megatron-core: pip install 'megatron-core>=0.16.1'")


def _open(prefix: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its optional accelerators, none of which a reader needs
        from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset: Any = IndexedDataset.__new__(IndexedDataset)
    try:
        dataset.__init__(str(prefix), mmap=True)
    except (OSError, ValueError, KeyError, AssertionError, struct.error) as error:
        dataset.bin_reader = dataset.index = None  # which its destructor expects to find
        raise DataError(f"{prefix}.idx is no index of megatron-core: {error}") from error
    return dataset


def write(prefix: Path, documents: Iterable[np.ndarray], vocab_size: int) -> tuple[int, int]:
    """Make `prefix`.bin and `prefix`.idx; both appear only when they are complete.

    Args:
        prefix: path without ending.
        documents: ids of each document, `(tokens,)`.
        vocab_size: decides the width of an id on disk.

    Returns:
        Documents and tokens written.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    unfinished = [prefix.with_name(f"{prefix.name}.{ending}.unfinished") for ending in ("bin", "idx")]
    num_documents = num_tokens = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(str(unfinished[0]), dtype=DType.optimal_dtype(vocab_size))
        for ids in documents:
            builder.add_item(torch.from_numpy(ids.astype(np.int64)))
            builder.end_document()
            num_documents += 1
            num_tokens += len(ids)
        builder.finalize(str(unfinished[1]))
        for path, ending in zip(unfinished, ("bin", "idx"), strict=True):
            os.replace(path, prefix.with_name(f"{prefix.name}.{ending}"))
    except OSError as error:
        raise DataError(f"{prefix}.bin cannot be written: {error}") from error
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    return num_documents, num_tokens
