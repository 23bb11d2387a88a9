"""What is active in a run: one line for people, and files beside the run. The same for both hosts; no torch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ext
from ext.config.decide import Decision
from ext.config.model import ExtConfig
from ext.core.errors import ConfigError
from ext.pipeline.plan_file import write_plan
from ext.recompute import tables_file

RESOLVED_CONFIG = "ext_resolved_config.json"
PLAN_FILE = "ext_plan.json"
"""Where a searched plan is written, for a later run to take as its `plan_file`."""


def summary(host: str, decision: Decision | None, more: str = "") -> str:
    """The one line that rank 0 prints at start.

    Args:
        host: its name and release.
        decision: what the pipeline runs; None without one.
        more: what else is active.
    """
    parts = [] if decision is None else [_pipeline(decision)]
    return f"megatron-deepspeed-ext {ext.__version__} on {host}: {', '.join([*parts, *filter(None, [more])])}"


def write_resolved(config: ExtConfig, decision: Decision | None, versions: Mapping[str, str]) -> Path:
    """Write what is active beside the run: in the folder EXT_RUN_DIR names, else the current one.

    A plan that was searched for is written too, as a plan file.

    Args:
        config: the user's.
        decision: what the pipeline runs; None without one.
        versions: of the host and of torch.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(os.environ.get("EXT_RUN_DIR", "."))
    path = folder / RESOLVED_CONFIG
    content = {
        "version": ext.__version__,
        "ext": config.model_dump(mode="json"),
        "plan": None if decision is None else _plan_json(decision),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the resolved config cannot be written to {path}: {error}. Set EXT_RUN_DIR to a folder that can."
        ) from error
    if decision is not None and decision.chosen is not None:
        all_versions = {"megatron-deepspeed-ext": ext.__version__, **versions, "python": platform.python_version()}
        notes = {"search": decision.chosen.to_json(), "versions": all_versions}
        if decision.tables is not None:
            notes[tables_file.KEY] = tables_file.tables_json(decision.tables)
        write_plan(folder / PLAN_FILE, decision.plan, costs=decision.chosen.costs, notes=notes)
    return path


def _pipeline(decision: Decision) -> str:
    plan = decision.plan
    return (
        f"schedule {plan.schedule}, {plan.num_ranks} ranks x {plan.num_microbatches} micro-batches, "
        f"layers per stage {_list(plan.layers_per_stage)}, recompute {decision.policy}, "
        f"recomputed layers {_list(plan.recomputed_layers)}, plan {plan.hash}"
    )


def _plan_json(decision: Decision) -> dict[str, Any]:
    plan = decision.plan
    return {
        "hash": plan.hash,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "layers_per_stage": plan.layers_per_stage,
        "search": None if decision.chosen is None else decision.chosen.to_json(),
        "recompute_policy": decision.policy,
        "recomputed_layers": plan.recomputed_layers,
        "recompute_tables": None if decision.tables is None else decision.tables.to_json(),
        "orders": plan.to_json(),
    }


def _list(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))
