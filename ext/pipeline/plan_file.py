"""Plans as files: JSON that people can read and edit, and that a later run takes as its schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ext.core.errors import ConfigError, ExtError
from ext.pipeline.actions import format_order, parse_order
from ext.pipeline.build import plan_of_orders
from ext.pipeline.costs import Costs
from ext.pipeline.plan import Plan, parse_tables

FORMAT = 1
_COUNTS = ("rank_of", "layers_per_stage", "recomputed_layers")


def write_plan(path: Path, plan: Plan, *, costs: Costs | None = None, notes: Mapping[str, Any] | None = None) -> None:
    """Write a plan.

    Args:
        path: of the file; its folder is made.
        plan: what to write; its sends and receives are left out, a reader adds them again.
        costs: what the plan was made for.
        notes: further keys for people, such as versions and how the plan was found; a reader ignores them.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = {
        "format": FORMAT,
        "hash": plan.hash,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        **{key: list(getattr(plan, key)) for key in _COUNTS},
        "orders": {str(rank): format_order(plan.compute_order(rank)) for rank in range(plan.num_ranks)},
        **({"unit_tables": plan.tables_json()} if plan.unit_tables else {}),
        "costs": None if costs is None else _costs_json(costs),
        **(notes or {}),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"the plan cannot be written to {path}: {error}.") from error


def read_plan(path: str | Path) -> Plan:
    """The plan in a file, proved again.

    Raises:
        ConfigError: the file cannot be read or holds no plan, an order is wrong, or its hash is that of another plan.
    """
    content = read_content(path)
    problems = _problems(content)
    if problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    num_ranks = len(content["orders"])
    try:
        plan = plan_of_orders(
            content.get("schedule", "plan_file"),
            [parse_order(content["orders"][str(rank)]) for rank in range(num_ranks)],
            num_microbatches=content["num_microbatches"],
            rank_of=content["rank_of"],
            layers_per_stage=content["layers_per_stage"],
            recomputed_layers=content["recomputed_layers"],
        )
        plan = replace(plan, unit_tables=parse_tables(content.get("unit_tables", ())))
    except ExtError as error:
        raise ConfigError(f"{path}: {error}") from error
    if content.get("hash", plan.hash) != plan.hash:
        raise ConfigError(
            f"{path}: its hash is {content['hash']}, its orders, layers and tables give {plan.hash}; it was changed by "
            "hand. Remove 'hash' to run it as it is."
        )
    return plan


def read_content(path: str | Path) -> Any:
    """What a plan's file holds, notes included, as it stands there.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no plan can be read: {error}. Give a file that `auto` wrote.") from error


def _costs_json(costs: Costs) -> dict[str, Any]:
    """Without the bandwidth where it is infinite, for which JSON has no number."""
    found = asdict(costs)
    return {key: value for key, value in found.items() if value != float("inf")}


def _problems(content: Any) -> list[str]:
    """What is wrong with the shape of a file; its orders are looked at later."""
    if not isinstance(content, dict):
        return [f"found a {type(content).__name__}; a plan is an object."]
    if content.get("format") != FORMAT:
        return [f"format: found {content.get('format')!r}, this release reads {FORMAT}. Make the plan again."]
    problems = []
    if not _is_count(content.get("num_microbatches"), least=1):
        problems.append(f"num_microbatches: found {content.get('num_microbatches')!r}; give a whole number above 0.")
    for key in _COUNTS:
        counts = content.get(key)
        if not isinstance(counts, list) or not counts or not all(_is_count(count, least=0) for count in counts):
            problems.append(f"{key}: found {counts!r}; give one whole number per stage.")
    orders = content.get("orders")
    if not isinstance(orders, dict) or not all(isinstance(order, str) for order in orders.values()):
        problems.append("orders: give an object of rank -> actions as text, as in {'0': '0F0 0B0'}.")
    if problems:
        return problems
    orders, num_stages = content["orders"], len(content["rank_of"])
    problems += [
        f"{key}: {len(content[key])} numbers for {num_stages} stages; give one per stage."
        for key in _COUNTS
        if len(content[key]) != num_stages
    ]
    ranks = sorted(set(content["rank_of"]))
    if ranks != list(range(len(ranks))):
        problems.append(f"rank_of: found {content['rank_of']}; every rank from 0 on needs a stage.")
    if set(orders) != {str(rank) for rank in ranks}:
        problems.append(f"orders: found ranks {', '.join(orders)}; give one order for each of {len(ranks)} ranks.")
    for stage, (held, again) in enumerate(zip(content["layers_per_stage"], content["recomputed_layers"], strict=False)):
        if held < 1 or again > held:
            problems.append(f"stage {stage} recomputes {again} of {held} layers; give at least 1 layer, and 0 to all.")
    return problems + _table_problems(content.get("unit_tables"), content["layers_per_stage"])


def _table_problems(tables: Any, layers: list[int]) -> list[str]:
    """What is wrong with the shape of unit tables, where there are any."""
    if tables is None:
        return []
    counts = [len(stage) if isinstance(stage, list) else 0 for stage in tables] if isinstance(tables, list) else []
    # A host may count what it runs around its layers as layers, too.
    if len(counts) != len(layers) or any(count < held for count, held in zip(counts, layers, strict=True)):
        return [f"unit_tables: for {counts} layers by stage, the plan has {layers}; give one object per layer."]
    return [
        f"unit_tables: found {table!r} on stage {stage}; give an object of unit -> decision."
        for stage, of_stage in enumerate(tables)
        for table in of_stage
        if not isinstance(table, dict) or not all(isinstance(done, str) for done in table.values())
    ]


def _is_count(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
