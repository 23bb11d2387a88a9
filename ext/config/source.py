"""Reading a ds_config the way DeepSpeed does: a dictionary, a file in (H)JSON, or base64 text of it."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import hjson

from ext.config.problems import Problem, shown
from ext.core.errors import ConfigError

MAX_BYTES = 16 * 2**20
_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


class UnreadableConfig(ConfigError):
    """A ds_config that cannot be read; `problem` has the file as its key."""

    def __init__(self, name: str, message: str) -> None:
        self.problem = Problem(name, message)
        super().__init__(str(self.problem))


def read_ds_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The dictionary that DeepSpeed would work with.

    Like DeepSpeed this takes Hjson (comments, trailing commas, keys without quotes) and refuses a key that
    stands twice in one object.

    Raises:
        UnreadableConfig: with file, line and column where there are any.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, Path)):
        found = type(config).__name__
        raise UnreadableConfig("ds_config", f"found {found}; allowed: a dictionary, a path, or base64 text of JSON.")
    name = str(config)
    if not name:
        raise UnreadableConfig("ds_config", "found an empty text; allowed: a dictionary, a path, or base64 of JSON.")
    if os.path.exists(name):
        return _parse(_read(name), name)
    text = _from_base64(name)
    if text is None:
        raise UnreadableConfig(name[:200], "no such file. Give the path of a ds_config in JSON.")
    return _parse(text, "base64 ds_config")


def _read(name: str) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableConfig(name, f"{error.strerror}. Give the path of a ds_config in JSON.") from error
    if len(data) > MAX_BYTES:
        raise UnreadableConfig(name, f"larger than {MAX_BYTES // 2**20} MiB, so no ds_config. Give the path of one.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        found = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise UnreadableConfig(name, f"line {line}, column {column}: {found}. Save the file as UTF-8.") from error


def _from_base64(text: str) -> str | None:
    """The JSON inside, or None where ``text`` is no base64 of a JSON object."""
    if not re.fullmatch(r"[A-Za-z0-9_\-\s]+=*\s*", text):
        return None
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    if not text.strip():
        raise UnreadableConfig(name, "empty. A ds_config is a JSON object.")
    repeated: list[str] = []

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in items)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(items)

    try:
        config = hjson.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise UnreadableConfig(name, "nested too deeply to be a ds_config.") from None
    except (ValueError, OverflowError) as error:
        raise UnreadableConfig(name, f"{_where_broken(text, error)}.") from error
    if repeated:
        places = [f"{_where_repeated(text, key)}key '{key}' stands twice in one object" for key in repeated]
        raise UnreadableConfig(name, f"{'; '.join(dict.fromkeys(places))}. Remove one.")
    if not isinstance(config, dict):
        raise UnreadableConfig(name, f"holds {shown(config)}; allowed: a JSON object.")
    return config


def _where_broken(text: str, error: Exception) -> str:
    """Line, column and reason. The strict JSON parser explains better than the lenient one."""
    try:
        json.loads(_without_comments(text), parse_constant=_refuse_constant)
    except json.JSONDecodeError as strict:
        return f"line {strict.lineno}, column {strict.colno}: {strict.msg}"
    except (ValueError, RecursionError) as strict:
        error.args = strict.args
    line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
    return f"line {line}, column {column}: {error}" if line and column else str(error)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _where_repeated(text: str, key: str) -> str:
    """Line and column of the second ``key`` of one object; empty where it is written without quotes."""
    seen: list[set[str]] = []
    tokens = list(_TOKEN.finditer(_without_comments(text)))
    for token, after in zip(tokens, tokens[1:], strict=False):
        if token[0] in "{[":
            seen.append(set())
        elif token[0] in "}]" and seen:
            seen.pop()
        elif seen and after[0] == ":":
            word = token[0].strip('"')
            if word == key and word in seen[-1]:
                start = token.start()
                return f"line {text.count(chr(10), 0, start) + 1}, column {start - text.rfind(chr(10), 0, start)}: "
            seen[-1].add(word)
    return ""


def _without_comments(text: str) -> str:
    """``text`` with its comments blanked, so that every other character keeps its place."""
    return _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)
