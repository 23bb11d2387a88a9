"""Which settings work on Megatron in this release; what works on DeepSpeed only is refused as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ext
from ext.config import ExtConfig
from ext.config.check import unit_policy_problems

SUPPORTED = frozenset(
    {
        "enabled",
        "pipeline.schedule",
        "pipeline.partition",
        "pipeline.tolerance",
        "recompute.policy",
        "recompute.memory_budget_gib",
        "recompute.overlap",
        "moe.dispatcher",
        "moe.topology.ranks_per_node",
        "trace.path",
        "trace.steps",
        "watchdog",
    }
)


def unsupported(config: ExtConfig, keys: tuple[str, ...], name: Callable[[str], str]) -> list[str]:
    """What of ``config`` this host cannot do.

    Args:
        config: the user's.
        keys: every dotted key that there is.
        name: how a dotted key is called where the user set it.
    """
    problems = [
        f"{name(key)}: not built for Megatron in this release ({ext.__version__}). Remove it."
        for key in keys
        if key not in SUPPORTED and _is_set(config, key)
    ]
    if config.pipeline is not None and config.pipeline.partition.type != "module":
        problems.append(
            f"{name('pipeline.partition')}: found '{config.pipeline.partition.type}', but Megatron places layers "
            "itself. Remove it, and use --pipeline-model-parallel-layout for uneven stages."
        )
    problems += (f"{name(p.key.removeprefix('ext.'))}: {p.message}" for p in unit_policy_problems(config))
    if config.moe is not None:
        problems += _dispatcher_problems(config.moe.dispatcher, name("moe.dispatcher"))
    return problems


def _dispatcher_problems(options: Any, name: str) -> list[str]:
    if options.type == "hierarchical" and options.deduplicate:
        return [
            f"{name}: 'deduplicate' cannot work here: Megatron makes a copy of a token per expert before it is sent. "
            "Remove it."
        ]
    return []


def _is_set(config: Any, key: str) -> bool:
    *parents, last = key.split(".")
    for parent in parents:
        config = getattr(config, parent)
        if config is None:
            return False
    default = type(config).model_fields[last].get_default(call_default_factory=True)
    return getattr(config, last) != default
