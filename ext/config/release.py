"""What this release has built. Building a feature flips its entry here, and nothing else in this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ext
from ext.config.problems import shown
from ext.core.errors import ConfigError, nearest
from ext.core.model import StrictModel
from ext.core.registry import Registry
from ext.moe.dispatcher import DISPATCHERS
from ext.pipeline.schedule import SCHEDULES
from ext.recompute.policy import POLICIES

OWN = "package.module:Class"
"""Entry that stands for every class named by its import path."""
PER_STAGE = "per_stage"
"""Type of a plain list, one number per stage."""

BUILT: dict[str, bool | dict[str, bool]] = {
    "enabled": True,
    "pipeline.schedule": {
        "1f1b": True,
        "gpipe": True,
        "early_recompute": True,
        "last_no_recompute": True,
        "shifted_critical_path": True,
        "zb_h1": True,
        "auto": True,
        "plan_file": True,
        OWN: True,
    },
    "pipeline.partition": {
        "module": True,
        "uniform": True,
        "recompute_aware": True,
        "auto": True,
        PER_STAGE: True,
    },
    "pipeline.tolerance": True,
    "recompute.policy": {
        "none": True,
        "full": True,
        PER_STAGE: True,
        "stage_aware": True,
        "lynx_heu": True,
        "lynx_opt": True,
        "auto": False,
        "delta": False,
        "unified": False,
        OWN: False,
    },
    "recompute.memory_budget_gib": True,
    "recompute.overlap": True,
    "tensor_parallel.sub_pipeline": True,
    "moe.dispatcher": {
        "linear": True,
        "hierarchical": True,
        "auto": True,
        OWN: True,
    },
    "moe.parallelism": False,
    "moe.pipeline_degree": False,
    "moe.topology.ranks_per_node": True,
    "moe.router": True,
    "trace.path": True,
    "trace.steps": True,
    "watchdog": True,
    "self_check": False,
}

_REGISTRIES: dict[str, Registry[Any]] = {
    "pipeline.schedule": SCHEDULES,
    "recompute.policy": POLICIES,
    "moe.dispatcher": DISPATCHERS,
}


def named(key: str) -> bool:
    """Whether the values of ``key`` are names, which may carry options."""
    return isinstance(BUILT.get(key), dict)


def require(key: str, value: object, default: object) -> None:
    """Refuses what this release does not know or has not built; a default value asks for nothing and passes.

    Raises:
        ConfigError: the reason, without the key in front.
    """
    entry = BUILT.get(key)
    if entry is False and value is not None and (value != default or type(value) is not type(default)):
        raise ConfigError(f"not built in this release ({ext.__version__}). Remove the key.")
    if isinstance(entry, dict) and not isinstance(value, StrictModel):
        _require_name(key, entry, value)


def _require_name(key: str, entry: dict[str, bool], value: object) -> None:
    name = name_of(value)
    registered = _REGISTRIES.get(key, ())
    if not isinstance(name, str):
        raise ConfigError(
            f"found {shown(value)}; allowed: {_allowed(entry, registered)}, or an object with one of these "
            "names as 'type' and its options."
        )
    state = entry.get(OWN if ":" in name else name, name in registered or None)
    if state is None:
        kind = key.rpartition(".")[2]
        raise ConfigError(
            f"unknown {kind} '{name[:60]}'.{nearest(name, entry)} Allowed: {_allowed(entry, registered)}."
        )
    if not state:
        what = "a list" if isinstance(value, (list, tuple)) else f"'{name}'"
        raise ConfigError(
            f"{what} is not built in this release ({ext.__version__}). Allowed: {_allowed(entry, registered)}."
        )


def name_of(value: object) -> object:
    """The name in a value that is a name, an object with a ``type``, or a list per stage."""
    if isinstance(value, dict):
        return value.get("type")
    return PER_STAGE if isinstance(value, (list, tuple)) else value


def _allowed(entry: dict[str, bool], registered: Iterable[str]) -> str:
    built = [name for name, state in entry.items() if state]
    names = [_shown(name) for name in [*built, *(name for name in registered if name not in entry)]]
    return ", ".join(names) if names else f"nothing in this release ({ext.__version__})"


def _shown(name: str) -> str:
    return "a list of numbers, one per stage" if name == PER_STAGE else f"'{name}'"
