"""The flags of Megatron runs: one for every key of `ExtConfig`, made from it. Free of torch and of Megatron."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from ext.adapters.megatron.support import unsupported
from ext.config import ExtConfig
from ext.config.model import read_block
from ext.config.problems import Problem
from ext.config.source import read_ds_config
from ext.core.errors import ConfigError, nearest

PREFIX = "--ext-"
CONFIG_FILE = "--ext-config"
_NUMBERS = re.compile(r"-?[\d.]+(,-?[\d.]+)+,?")


@dataclass(frozen=True)
class Flag:
    """A flag and the key it stands for.

    Attributes:
        path: dotted key below ``"ext"``.
        help: its meaning and what it allows.
    """

    path: str
    help: str

    @property
    def name(self) -> str:
        return PREFIX + re.sub(r"[._]", "-", self.path)


def flags() -> tuple[Flag, ...]:
    """Every flag but ``--ext-config``, in the order of the model."""
    return tuple(_flags_of(ExtConfig, ""))


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group of flags; for Megatron's ``extra_args_provider``."""
    group = parser.add_argument_group(
        "megatron-deepspeed-ext",
        "pipeline schedules, recomputation and MoE dispatch. A value is text, a number, numbers with commas between "
        'them (one per stage), or JSON such as \'{"type": "shifted_critical_path", "extra_forwards": 1}\'.',
    )
    group.add_argument(
        CONFIG_FILE, metavar="FILE", help='JSON file with the value of "ext", as in a DeepSpeed config; flags add to it'
    )
    for flag in flags():
        group.add_argument(flag.name, metavar="VALUE", help=flag.help.replace("%", "%%"))
    return parser


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        config: None where nothing is asked, or all is turned off.
        typed: by dotted key, the flag it was given by.
        file: what ``--ext-config`` names.
    """

    config: ExtConfig | None
    typed: Mapping[str, str]
    file: str | None

    def name(self, key: str) -> str:
        """How messages call a dotted key: by its flag, unless it can only come from the file."""
        return _flag_name(key) if self.file is None or key in self.typed else f"ext.{key} in {self.file}"


def read(arguments: Sequence[str]) -> Request:
    """The request in a command line; all flags that are not ours are left alone.

    Raises:
        ConfigError: everything that is wrong with our flags and the file, one problem per line.
    """
    known = [CONFIG_FILE, *(flag.name for flag in flags())]
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith(PREFIX)]
    problems = [f"{name}: unknown flag.{nearest(name, known)}" for name in given if name not in known]
    problems += [f"{name}: given more than once." for name in dict.fromkeys(given) if given.count(name) > 1]
    if problems:
        raise ConfigError(*problems)
    parser = _Parser(allow_abbrev=False, add_help=False)
    values = vars(add_arguments(parser).parse_known_args([*arguments])[0])
    typed = {flag.path: values[_dest(flag.name)] for flag in flags() if values[_dest(flag.name)] is not None}
    file = values[_dest(CONFIG_FILE)]
    return _request(file, typed)


def _request(file: str | None, typed: Mapping[str, str]) -> Request:
    block: dict[str, Any] = {} if file is None else _copy(read_ds_config(file))
    problems: list[Problem] = []
    for path, text in typed.items():
        problems += _put(block, path, _value(text), file)
    names = {path: _flag_name(path) for path in typed}
    request = Request(None, names, file)
    if file is not None or typed:
        config, found = read_block(block)
        problems += [_by_flag(problem, names, file) for problem in found]
        request = replace(request, config=config)
    messages = [str(problem) for problem in problems]
    if request.config is not None:
        messages += unsupported(request.config, tuple(flag.path for flag in flags()), request.name)
    if messages:
        raise ConfigError(*messages)
    return request


def _put(block: dict[str, Any], path: str, value: Any, file: str | None) -> Iterator[Problem]:
    *parents, key = path.split(".")
    within: Any = block
    for parent in parents:
        within = within.setdefault(parent, {})
        if not isinstance(within, dict):
            return  # the model says what is wrong with it
    if key in within:
        yield Problem(_flag_name(path), f"also given as '{path}' in {file}. Remove one.")
    within[key] = value


def _by_flag(problem: Problem, names: Mapping[str, str], file: str | None) -> Problem:
    """The problem under the name of the flag that its key came from, or without a file could only come from."""
    key = problem.key.removeprefix("ext").lstrip(".")
    for path, name in names.items():
        if key == path or key.startswith(f"{path}."):
            return Problem(name, f"{key[len(path) + 1 :]}: {problem.message}" if key != path else problem.message)
    if file is None and key in {flag.path for flag in flags()}:
        return Problem(_flag_name(key), problem.message)
    return problem


def _value(text: str) -> Any:
    if _NUMBERS.fullmatch(text):
        text = f"[{text.rstrip(',')}]"
    try:
        return json.loads(text)
    except ValueError:
        return text


def _copy(block: Any) -> dict[str, Any]:
    return json.loads(json.dumps(block))


def _flags_of(model: type[BaseModel], prefix: str) -> Iterator[Flag]:
    for name, field in model.model_fields.items():
        inner = _block(field.annotation)
        if inner is not None:
            yield from _flags_of(inner, f"{prefix}{name}.")
            continue
        allowed = field.json_schema_extra.get("allowed") if isinstance(field.json_schema_extra, dict) else None
        yield Flag(f"{prefix}{name}", f"{field.description or name}{f' ({allowed})' if allowed else ''}")


def _block(annotation: Any) -> type[BaseModel] | None:
    """The part of the config that an annotation holds; a value that may be written as a name is no part."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation if "type" not in annotation.model_fields else None
    if get_origin(annotation) in (Union, UnionType, Annotated):
        blocks = (_block(argument) for argument in get_args(annotation))
        return next((block for block in blocks if block is not None), None)
    return None


def _flag_name(path: str) -> str:
    return Flag(path, "").name


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message[:1].upper() + message[1:] + ".")
