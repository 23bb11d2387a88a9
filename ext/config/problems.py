"""Violations of a configuration: each with its dotted key as typed, all of them at once."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ext.core.errors import ConfigError, nearest_name

M = TypeVar("M", bound=BaseModel)
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
    type(None): "null",
}


@dataclass(frozen=True)
class Problem:
    """One violation.

    Attributes:
        key: dotted key as typed, or the file where none can be named.
        message: what was found, what is allowed, what to change.
    """

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


class Violations(ValueError):
    """Problems inside a value, their keys relative to it; `validate` puts them in their place."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))

    def under(self, key: str) -> list[Problem]:
        """The problems with ``key`` in front of theirs."""
        return [Problem(".".join(part for part in (key, p.key) if part), p.message) for p in self.problems]


def validate(model: type[M], data: Any, elsewhere: Iterable[str] = ()) -> M:
    """``data`` as ``model``; ``elsewhere`` are dotted keys to suggest for keys in the wrong place.

    Raises:
        Violations: every problem, keys relative to ``data``.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise Violations(_problems(error, model, data, tuple(elsewhere))) from None


def _problems(error: ValidationError, model: type[BaseModel], data: Any, elsewhere: tuple[str, ...]) -> list[Problem]:
    problems: list[Problem] = []
    missing: list[Problem] = []
    meant: set[str] = set()
    for item in error.errors(include_url=False):
        kind, loc = item["type"], item["loc"]
        path, value = _typed_path(data, loc, missing=kind == "missing")
        key = ".".join(path)
        cause = item.get("ctx", {}).get("error")
        if kind in ("extra_forbidden", "invalid_key"):
            parent = _model_at(model, path[:-1])
            names = list(parent.model_fields) if parent else []
            meant.add(".".join([*path[:-1], nearest_name(path[-1], names) or ""]))
            problems.append(Problem(key, _unknown_key(path[-1], names, elsewhere)))
        elif kind == "missing":
            missing.append(Problem(key, f"missing. Allowed: {_allowed(model, path)}."))
        elif isinstance(cause, Exception):
            problems.extend(_of_cause(cause, key, value))
        else:
            problems.append(Problem(key, f"found {shown(value)}; allowed: {_allowed(model, path)}."))
    problems += (problem for problem in missing if problem.key not in meant)
    return list(dict.fromkeys(problems))


def _of_cause(cause: Exception, key: str, value: Any) -> list[Problem]:
    """The problems that one of our own validators reported for the ``value`` under ``key``."""
    if isinstance(cause, Violations):
        # A name or a list stands for an object whose keys the user did not type.
        if isinstance(value, dict):
            return cause.under(key)
        # An option that is missing is typed in an object.
        hint = f"write {{'type': {value!r}, ...}} with this option" if isinstance(value, str) else ""
        return [
            Problem(
                key,
                f"'{p.key}' is {p.message[:-1]}; {hint}." if p.message.startswith("missing") and hint else p.message,
            )
            for p in cause.problems
        ]
    return [Problem(key, message) for message in (cause.problems if isinstance(cause, ConfigError) else [str(cause)])]


def _unknown_key(name: str, allowed: list[str], elsewhere: Iterable[str]) -> str:
    close = nearest_name(name, allowed)
    if close is None:
        parts = (key.split(".") for key in elsewhere)
        close = next((".".join(key[: key.index(name) + 1]) for key in parts if name in key), None)
    hint = f" Did you mean '{close}'?" if close else ""
    return f"unknown key.{hint} Allowed: {', '.join(allowed) or 'none'}."


def _typed_path(data: Any, loc: tuple[int | str, ...], *, missing: bool) -> tuple[list[str], Any]:
    """The part of ``loc`` that the user typed as keys, or should have, and the value there.

    Behind it stand list positions and, for a value that may be of several types, the type that was tried.
    """
    path: list[str] = []
    for part in loc:
        if not isinstance(data, dict):
            break
        if part not in data:
            if missing:
                path.append(str(part))
            break
        path.append(str(part) or '""')
        data = data[part]
    return path, data


def _model_at(model: type[BaseModel] | None, loc: Iterable[int | str]) -> type[BaseModel] | None:
    for part in loc:
        field = model.model_fields.get(str(part)) if model else None
        model = _block(field.annotation) if field else None
    return model


def _block(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _allowed(model: type[BaseModel], path: list[str]) -> str:
    """The text of what may stand at ``path``: the field's own, else the keys of its block."""
    parent = _model_at(model, path[:-1])
    field = parent.model_fields.get(path[-1]) if parent and path else None
    if field and isinstance(field.json_schema_extra, dict) and "allowed" in field.json_schema_extra:
        return str(field.json_schema_extra["allowed"])
    block = _model_at(model, path)
    if block:
        return f"an object with the keys {', '.join(block.model_fields)}"
    assert field is not None
    return f"{_in_words(field.annotation)}{f' ({field.description})' if field.description else ''}"


def _in_words(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(shown, args))
    if origin in (Union, UnionType):
        return " or ".join(_in_words(arg) for arg in args)
    return _WORDS.get(origin or annotation, str(annotation))


def shown(value: Any) -> str:
    """``value`` as in a JSON file, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
