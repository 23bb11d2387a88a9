"""From the user's config and module to the plan that the engine runs; the same on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ext
from ext.adapters.deepspeed.layers import LayerInventory
from ext.config import ExtConfig
from ext.core.errors import ConfigError
from ext.pipeline.actions import Action, F
from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.memory_table import GIB, amount
from ext.pipeline.passes import add_communication
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.pipeline.stage_model import PipelineProfile
from ext.recompute.policy import POLICIES, PerStageRecompute
from ext.recompute.stage_aware import BudgetError, Choice, ProfiledPolicy

RESOLVED_CONFIG = "ext_resolved_config.json"
BUDGET_KEY = "ext.recompute.memory_budget_gib"
DEFAULT_SHARE = 0.9
"""Share of the device's memory that is the budget where none is given."""


@dataclass(frozen=True)
class Resolution:
    """What the config means for this module.

    Attributes:
        schedule: that the plan was made from.
        plan: orders, layout and recomputed layers.
        policy: name of the recompute policy in force, for people.
        replaces_host_checkpointing: whether DeepSpeed's activation_checkpoint_interval is out of force.
    """

    schedule: Schedule
    plan: Plan
    policy: str
    replaces_host_checkpointing: bool


def resolve(
    config: ExtConfig,
    inventory: LayerInventory,
    num_stages: int,
    num_microbatches: int,
    profile: PipelineProfile | None = None,
    budgets: Sequence[int] | None = None,
) -> Resolution:
    """Build the plan. Needs no communication: its arguments are the same on every rank.

    Args:
        config: the user's.
        inventory: layers of the module.
        num_stages: pipeline stages.
        num_microbatches: per step.
        profile: of the stages, once there is one; policies that need it recompute everything until then.
        budgets: bytes that each stage may hold, with the profile.

    Raises:
        ConfigError: the schedule or the policy cannot work with these stages, layers or micro-batches.
    """
    schedule = make_schedule(config, PipelineShape(num_stages, num_microbatches))
    recomputable = inventory.recomputable_per_stage
    may_recompute = [schedule.may_recompute(stage) for stage in range(len(recomputable))]
    if config.recompute is None:
        recomputed = default_recompute(schedule, recomputable)
        policy = "full (the schedule's own)" if schedule.recomputes_by_default else "none (the schedule's own)"
    else:
        options = config.recompute.policy
        chosen = POLICIES.get(options.type)(options)
        recomputed = chosen.recomputed_layers(recomputable, may_recompute)
        policy = f"{options.type} (ext.recompute)"
        if isinstance(chosen, ProfiledPolicy) and profile is None:
            policy = f"{options.type} (ext.recompute; full until the first train_batch decides)"
        elif isinstance(chosen, ProfiledPolicy) and profile is not None and budgets is not None:
            choice = _choose(chosen, schedule, profile, budgets)
            schedule, recomputed = choice.schedule, choice.recomputed_layers
    plan = build_plan(schedule, layers_per_stage=inventory.layers_per_stage, recomputed_layers=recomputed)
    return Resolution(schedule, plan, policy, config.recompute is not None or schedule.recomputes_by_default)


def _choose(policy: ProfiledPolicy, schedule: Schedule, profile: PipelineProfile, budgets: Sequence[int]) -> Choice:
    try:
        return policy.choose(schedule, profile.models(schedule.may_recompute), budgets, amount)
    except BudgetError as error:
        first, *rest = error.problems
        raise BudgetError(f"{BUDGET_KEY}: {first}", *rest) from None


def needs_profile(config: ExtConfig) -> bool:
    """Whether the config asks for what only a profile of the layers can tell: a policy, or a budget to keep."""
    recompute = config.recompute
    return recompute is not None and (
        recompute.memory_budget_gib is not None or issubclass(POLICIES.get(recompute.policy.type), ProfiledPolicy)
    )


def allowed_counts(config: ExtConfig, schedule: Schedule) -> Callable[[int, int], Sequence[int]]:
    """Numbers of recomputed layers that the config leaves open, of a stage and the most that it can have."""
    options = None if config.recompute is None else config.recompute.policy
    if options is not None and issubclass(POLICIES.get(options.type), ProfiledPolicy):
        return lambda stage, most: range(most + 1)
    if isinstance(options, PerStageRecompute.Config):
        layers = options.layers
        return lambda stage, most: [count for count in layers[stage : stage + 1] if count <= most]
    recomputes = schedule.recomputes_by_default if options is None else options.type == "full"
    return lambda stage, most: [most if recomputes else 0]


def budgets_in_bytes(config: ExtConfig, num_stages: int, device_bytes: int | None) -> list[int] | None:
    """What the rank of each stage may hold; None where neither config nor device says.

    Args:
        config: the user's.
        num_stages: pipeline stages.
        device_bytes: memory of a rank's device; None where ranks have no device of their own.
    """
    given = None if config.recompute is None else config.recompute.memory_budget_gib
    if given is not None:
        per_stage = given if isinstance(given, tuple) else (given,) * num_stages
        return [round(gib * GIB) for gib in per_stage]
    return None if device_bytes is None else [round(device_bytes * DEFAULT_SHARE)] * num_stages


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

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = Path(os.environ.get("EXT_RUN_DIR", ".")) / RESOLVED_CONFIG
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
    return path


def _plan_json(resolution: Resolution) -> dict[str, Any]:
    plan = resolution.plan
    return {
        "hash": plan.hash,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "layers_per_stage": plan.layers_per_stage,
        "recompute_policy": resolution.policy,
        "recomputed_layers": plan.recomputed_layers,
        "orders": plan.to_json(),
    }


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
