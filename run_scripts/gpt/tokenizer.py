"""Tokenizers: plain bytes, or a JSON file of the `tokenizers` package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

import numpy as np

from ext.core.errors import ConfigError, DataError

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Text to token ids; `eod` stands after each document and counts in `vocab_size`."""

    vocab_size: int
    eod: int

    def encode(self, text: bytes, name: str) -> np.ndarray:
        """Ids of one document without `eod`; `name` stands in errors."""
        ...


class ByteTokenizer:
    """One token per byte, so any file will do."""

    vocab_size = 257
    eod = 256

    def encode(self, text: bytes, name: str) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)


class JsonTokenizer:
    """A tokenizer trained with, or exported by, the `tokenizers` package.

    Its own end-of-document token is used if it has one of the usual names, else one id is added behind the others.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise ConfigError("--tokenizer needs the package 'tokenizers': pip install tokenizers")
        from tokenizers import Tokenizer as Encoder

        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--tokenizer: {path} cannot be read: {error}") from error
        try:
            self._encoder = Encoder.from_str(content)
        except Exception as error:
            raise ConfigError(f"--tokenizer: {path} is no JSON file of the 'tokenizers' package: {error}") from error
        known = self._encoder.get_vocab()
        size = max(known.values()) + 1
        named = [known[name] for name in END_OF_DOCUMENT_NAMES if name in known]
        self.eod = named[0] if named else size
        self.vocab_size = max(size, self.eod + 1)

    def encode(self, text: bytes, name: str) -> np.ndarray:
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is no UTF-8 text: {error}. Convert it, or train on bytes without --tokenizer."
            ) from error
        return np.asarray(self._encoder.encode(decoded, add_special_tokens=False).ids, dtype=np.int32)


def load(path: Path | None) -> Tokenizer:
    """The tokenizer of a JSON file, or bytes where there is none.

    Raises:
        ConfigError: the file is unreadable or no tokenizer, or the package is missing.
    """
    return ByteTokenizer() if path is None else JsonTokenizer(path)
