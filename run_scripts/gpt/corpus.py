"""Where the tokens come from: text files, or a Megatron pair of .bin and .idx; and which of them validate."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ext.core.errors import DataError
from gpt.tokenizer import Tokenizer

VALIDATION_SHARE = 0.05
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class Tokens(Protocol):
    """A long row of token ids, in memory or on disk."""

    def __len__(self) -> int: ...

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids `start` to `start + count`, `(count,)`."""
        ...


@dataclass(frozen=True)
class ArrayTokens:
    """Tokens in memory."""

    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        return self.ids[start : start + count]


@dataclass(frozen=True)
class Range:
    """The part `[start, stop)` of other tokens."""

    tokens: Tokens
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens.read(self.start + start, min(count, len(self) - start))


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens to validate on; no document is in both if a boundary lies near the cut."""

    train: Range
    validation: Range

    @classmethod
    def split(cls, tokens: Tokens, document_starts: np.ndarray) -> Corpus:
        """Cut off the last `VALIDATION_SHARE` of the tokens, from the start of a document.

        Args:
            tokens: all documents.
            document_starts: position of each document's first token, ascending, `(documents,)`.
        """
        target = int(len(tokens) * (1 - VALIDATION_SHARE))
        before = document_starts[document_starts <= target]
        start = int(before[-1]) if len(before) else 0
        # A document longer than half of everything is cut in two.
        cut = start if 2 * start >= len(tokens) else target
        return cls(Range(tokens, 0, cut), Range(tokens, cut, len(tokens)))


class Source(Protocol):
    """Data that was found and looks usable, but is not read yet."""

    def load(self, tokenizer: Tokenizer) -> Corpus:
        """Read it.

        Raises:
            DataError: it cannot be read.
        """
        ...


@dataclass(frozen=True)
class TextFiles:
    """Files of text, one document each, ordered by a hash of their names below the root."""

    root: Path
    names: tuple[str, ...]

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """Path and content of every file."""
        for name in sorted(self.names, key=lambda name: hashlib.sha256(name.encode()).digest()):
            yield str(self.root / name), _read(self.root / name)

    def load(self, tokenizer: Tokenizer) -> Corpus:
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        eod = np.array([tokenizer.eod], dtype)
        parts = [
            np.concatenate((tokenizer.encode(text, name).astype(dtype), eod)) for name, text in self.documents() if text
        ]
        ends = np.cumsum([len(part) for part in parts])
        return Corpus.split(ArrayTokens(np.concatenate(parts)), np.concatenate(([0], ends[:-1])))


def find(path: Path | None) -> Source:
    """What `--data-path` names, checked as far as possible without reading all of it.

    `None` is the source of the running Python's standard library. A folder gives its text files, hidden ones apart;
    a prefix (or either file) of a Megatron pair gives the pair.

    Raises:
        DataError: nothing there, not readable, empty, or no text.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return TextFiles(root, tuple(name for name in _walk(root) if name.endswith(".py")))
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if path.suffix in (".bin", ".idx") or (not path.exists() and _pair(prefix)[1].exists()):
        from gpt.indexed import IndexedPair  # needs megatron-core, which is optional

        return IndexedPair.find(prefix, *_pair(prefix))
    if path.is_dir():
        names = tuple(name for name in _walk(path) if _is_text(path / name))
        if not names:
            raise DataError(f"the folder {path} has no text file with anything in it")
        return TextFiles(path, names)
    if not path.exists():
        raise DataError(f"{path} does not exist, nor does a pair {prefix}.bin and {prefix}.idx")
    if not _read(path, 1):
        raise DataError(f"{path} is empty")
    if not _is_text(path):
        raise DataError(f"{path} is no text: it has zero bytes")
    return TextFiles(path.parent, (path.name,))


def _pair(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def _walk(root: Path) -> Iterator[str]:
    """Names of the visible files below `root`, relative to it, in a fixed order."""
    try:
        entries = sorted(root.iterdir())
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS:
            continue
        if entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in _walk(entry))
        elif entry.is_file():
            yield entry.name


def _is_text(path: Path) -> bool:
    head = _read(path, 8192)
    return bool(head) and b"\0" not in head


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
