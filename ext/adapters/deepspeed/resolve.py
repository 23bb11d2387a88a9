"""From the user's config and module to the plan that the engine runs; the same on every rank."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import ext
from ext.adapters.deepspeed.layers import LayerInventory
from ext.config import ExtConfig
from ext.core.errors import ConfigError
from ext.pipeline.actions import Action, F
from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.passes import add_communication
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.recompute.policy import POLICIES

RESOLVED_CONFIG = "ext_resolved_config.json"


@dataclass(frozen=True)
class Resolution:
    """What the config means for this module.

    Attributes:
        plan: orders, layout and recomputed layers.
        policy: name of the recompute policy in force, for people.
        replaces_host_checkpointing: whether DeepSpeed's activation_checkpoint_interval is out of force.
    """

    plan: Plan
    policy: str
    replaces_host_checkpointing: bool


def resolve(config: ExtConfig, inventory: LayerInventory, num_stages: int, num_microbatches: int) -> Resolution:
    """Build the plan. Needs no communication: config and module are the same on every rank.

    Raises:
        ConfigError: the schedule or the policy cannot work with these stages, layers or micro-batches.
    """
    schedule = make_schedule(config, PipelineShape(num_stages, num_microbatches))
    recomputable = inventory.recomputable_per_stage
    may_recompute = [schedule.may_recompute(stage) for stage in range(len(recomputable))]
    if config.recompute is None:
        recomputed = default_recompute(schedule, recomputable)
        policy = "full" if schedule.recomputes_by_default else "none"
        source = "the schedule's own"
    else:
        options = config.recompute.policy
        recomputed = POLICIES.get(options.type)(options).recomputed_layers(recomputable, may_recompute)
        policy, source = options.type, "ext.recompute"
    plan = build_plan(schedule, layers_per_stage=inventory.layers_per_stage, recomputed_layers=recomputed)
    return Resolution(plan, f"{policy} ({source})", config.recompute is not None or schedule.recomputes_by_default)


def make_schedule(config: ExtConfig, shape: PipelineShape) -> Schedule:
    """The configured schedule; 1f1b where the config names none."""
    options = None if config.pipeline is None else config.pipeline.schedule
    if options is None:
        return SCHEDULES.get("1f1b")(shape=shape)
    return SCHEDULES.get(options.type)(options, shape=shape)


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


def summary(resolution: Resolution) -> str:
    """The one line that rank 0 prints at start."""
    import deepspeed

    plan = resolution.plan
    return (
        f"megatron-deepspeed-ext {ext.__version__} on deepspeed {deepspeed.__version__}: "
        f"schedule {plan.schedule}, {plan.num_ranks} ranks x {plan.num_microbatches} micro-batches, "
        f"layers per stage {_list(plan.layers_per_stage)}, recompute {resolution.policy}, "
        f"recomputed layers {_list(plan.recomputed_layers)}, plan {plan.hash}"
    )


def write_resolved(config: ExtConfig, resolution: Resolution) -> Path:
    """Write what is active beside the run: in the folder EXT_RUN_DIR names, else the current one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    plan = resolution.plan
    path = Path(os.environ.get("EXT_RUN_DIR", ".")) / RESOLVED_CONFIG
    content = {
        "version": ext.__version__,
        "ext": config.model_dump(mode="json"),
        "plan": {
            "hash": plan.hash,
            "schedule": plan.schedule,
            "num_microbatches": plan.num_microbatches,
            "layers_per_stage": plan.layers_per_stage,
            "recompute_policy": resolution.policy,
            "recomputed_layers": plan.recomputed_layers,
            "orders": plan.to_json(),
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the resolved config cannot be written to {path}: {error}. Set EXT_RUN_DIR to a folder that can."
        ) from error
    return path


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
