"""From the user's config and module to the plan that the engine runs; the same on every rank."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ext
from ext.adapters.deepspeed.layers import LayerInventory
from ext.config import ExtConfig
from ext.config.decide import Decision, decide
from ext.core.errors import ConfigError
from ext.pipeline.actions import Action, F
from ext.pipeline.passes import add_communication
from ext.pipeline.plan import Plan
from ext.pipeline.plan_file import write_plan
from ext.pipeline.stage_model import PipelineProfile
from ext.planner.search.search import Chosen

RESOLVED_CONFIG = "ext_resolved_config.json"
PLAN_FILE = "ext_plan.json"
"""Where a searched plan is written, for a later run to take as its `plan_file`."""


@dataclass(frozen=True)
class Resolution(Decision):
    """What the config means for this module.

    Attributes:
        replaces_host_checkpointing: whether DeepSpeed's activation_checkpoint_interval is out of force.
    """

    replaces_host_checkpointing: bool = False


def resolve(
    config: ExtConfig,
    inventory: LayerInventory,
    num_microbatches: int,
    profile: PipelineProfile | None = None,
    budgets: Sequence[int] | None = None,
) -> Resolution:
    """Build the plan for a module's layers; see `decide`."""
    decision = decide(
        config,
        inventory.layers_per_stage,
        inventory.recomputable_per_stage,
        num_microbatches,
        profile,
        budgets,
    )
    plan, schedule = decision.plan, decision.schedule
    replaces = config.recompute is not None or schedule.recomputes_by_default or any(plan.recomputed_layers)
    return Resolution(schedule, plan, decision.policy, decision.chosen, replaces)


def forward_plan(plan: Plan, num_microbatches: int) -> Plan:
    """Forwards only, for evaluation, on the placement of ``plan``."""
    orders = [
        [Action(stage, F, microbatch) for microbatch in range(num_microbatches) for stage in plan.stages_of(rank)]
        for rank in range(plan.num_ranks)
    ]
    return Plan(
        schedule="forward",
        num_microbatches=num_microbatches,
        rank_of=plan.rank_of,
        orders=add_communication(orders, plan.rank_of),
        layers_per_stage=plan.layers_per_stage,
        recomputed_layers=(0,) * plan.num_stages,
    )


def summary(config: ExtConfig, resolution: Resolution | None) -> str:
    """The one line that rank 0 prints at start; without a pipeline there is no resolution."""
    import deepspeed

    text = f"megatron-deepspeed-ext {ext.__version__} on deepspeed {deepspeed.__version__}: "
    dispatcher = "" if config.moe is None else f"MoE dispatcher {config.moe.dispatcher.type}"
    if resolution is None:
        return text + dispatcher
    plan = resolution.plan
    return (
        f"{text}schedule {plan.schedule}, {plan.num_ranks} ranks x {plan.num_microbatches} micro-batches, "
        f"layers per stage {_list(plan.layers_per_stage)}, recompute {resolution.policy}, "
        f"recomputed layers {_list(plan.recomputed_layers)}, plan {plan.hash}"
        f"{', ' + dispatcher if dispatcher else ''}"
    )


def write_resolved(config: ExtConfig, resolution: Resolution | None) -> Path:
    """Write what is active beside the run: in the folder EXT_RUN_DIR names, else the current one.

    A plan that was searched for is written too, as a plan file.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(os.environ.get("EXT_RUN_DIR", "."))
    path = folder / RESOLVED_CONFIG
    content = {
        "version": ext.__version__,
        "ext": config.model_dump(mode="json"),
        "plan": None if resolution is None else _plan_json(resolution),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the resolved config cannot be written to {path}: {error}. Set EXT_RUN_DIR to a folder that can."
        ) from error
    if resolution is not None and resolution.chosen is not None:
        _write_plan(folder / PLAN_FILE, resolution.chosen)
    return path


def _write_plan(path: Path, chosen: Chosen) -> None:
    import deepspeed
    import torch

    versions = {
        "megatron-deepspeed-ext": ext.__version__,
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    write_plan(path, chosen.plan, costs=chosen.costs, notes={"search": chosen.to_json(), "versions": versions})


def _plan_json(resolution: Resolution) -> dict[str, Any]:
    plan = resolution.plan
    return {
        "hash": plan.hash,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "layers_per_stage": plan.layers_per_stage,
        "search": None if resolution.chosen is None else resolution.chosen.to_json(),
        "recompute_policy": resolution.policy,
        "recomputed_layers": plan.recomputed_layers,
        "orders": plan.to_json(),
    }


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
