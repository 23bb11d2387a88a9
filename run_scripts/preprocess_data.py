"""Turn text into the .bin and .idx files that Megatron and `pretrain_gpt.py --data-path PREFIX` read.

    python run_scripts/preprocess_data.py --input my_texts/ --output-prefix data/mine
    run_scripts/pretrain_gpt.sh --data-path data/mine

Needs megatron-core, whose builder writes the files. Exit codes: 0 done, 3 wrong input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ext.core.errors import ConfigError, DataError, ExtError
from gpt import corpus, indexed, tokenizer
from gpt.tokenizer import Tokenizer


def main() -> int:
    """Parse, convert, say what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", type=Path, required=True, help="text file, folder of text files, or .jsonl")
    parser.add_argument("--json-key", default="text", help="where a line of a .jsonl file has its text (text)")
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", type=Path, help="JSON file of the 'tokenizers' package; default: bytes")
    options = parser.parse_args()
    try:
        indexed.require_megatron("preprocess_data.py")
        encoder = tokenizer.load(options.tokenizer)
        ids = _encode(_documents(options.input, options.json_key), encoder)
        num_documents, num_tokens = indexed.write(options.output_prefix, ids, encoder.vocab_size)
    except ExtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    vocabulary = "" if options.tokenizer is None else f" --tokenizer {options.tokenizer}"
    print(f"{num_documents} documents, {num_tokens} tokens; train with --data-path {options.output_prefix}{vocabulary}")
    return 0


def _documents(path: Path, json_key: str) -> Iterator[tuple[str, bytes]]:
    """Name and text of every document."""
    source = corpus.find(path)
    if not isinstance(source, corpus.TextFiles):
        raise ConfigError(f"--input: {path} is a pair of .bin and .idx already")
    for name, content in source.documents():
        if not name.endswith(".jsonl"):
            yield name, content
            continue
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield f"{name}, line {number}", _text_of(line, json_key, f"{name}, line {number}")


def _text_of(line: bytes, key: str, where: str) -> bytes:
    try:
        text = json.loads(line)[key]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is no JSON object with the key '{key}': {error!r}. See --json-key.") from error
    if not isinstance(text, str):
        raise DataError(f"{where}: the key '{key}' holds a {type(text).__name__}, needed is a string")
    return text.encode()


def _encode(documents: Iterator[tuple[str, bytes]], encoder: Tokenizer) -> Iterator[np.ndarray]:
    for name, text in documents:
        if text:
            yield np.append(encoder.encode(text, name).astype(np.int64), encoder.eod)


if __name__ == "__main__":
    sys.exit(main())
