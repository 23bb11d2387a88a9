"""From the config to the plan that the forward-backward function runs; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import ext
from ext.config import ExtConfig
from ext.core.errors import ConfigError
from ext.pipeline import placement
from ext.pipeline.actions import Action, F, W
from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.passes import add_communication
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.recompute.policy import POLICIES
from ext.recompute.stage_aware import ProfiledPolicy

_SAMPLE = PipelineShape(num_ranks=2, num_microbatches=8)


@dataclass(frozen=True)
class Resolution:
    """What the config means for this model.

    Attributes:
        plan: orders, layout and recomputed layers.
        policy: name of the recompute policy in force, for people.
    """

    plan: Plan
    policy: str


def resolve(config: ExtConfig, layers_per_stage: Sequence[int], num_microbatches: int) -> Resolution:
    """Build the plan. Needs no communication.

    Args:
        config: the user's.
        layers_per_stage: transformer layers of each pipeline stage.
        num_microbatches: per step.

    Raises:
        ConfigError: the schedule or the policy cannot work with these stages, layers or micro-batches.
    """
    schedule = make_schedule(config, PipelineShape(len(layers_per_stage), num_microbatches))
    may_recompute = [schedule.may_recompute(stage) for stage in range(len(layers_per_stage))]
    if config.recompute is None:
        recomputed = default_recompute(schedule, layers_per_stage)
        policy = "full (the schedule's own)" if schedule.recomputes_by_default else "none (the schedule's own)"
    else:
        options = config.recompute.policy
        recomputed = POLICIES.get(options.type)(options).recomputed_layers(layers_per_stage, may_recompute)
        policy = f"{options.type} (ext.recompute)"
    plan = build_plan(schedule, layers_per_stage=layers_per_stage, recomputed_layers=recomputed)
    for rank in range(plan.num_ranks):
        forwards = [action.microbatch for action in plan.orders[rank] if action.kind is F]
        if forwards != sorted(forwards):
            raise ConfigError(
                f"ext.pipeline.schedule: '{plan.schedule}' runs the forwards of rank {rank} in the order {forwards}; "
                "Megatron's data iterator gives micro-batches in ascending order only. Use another schedule."
            )
    return Resolution(plan, policy)


def make_schedule(config: ExtConfig, shape: PipelineShape) -> Schedule:
    """The configured schedule; 1f1b where the config names none."""
    options = None if config.pipeline is None else config.pipeline.schedule
    if options is None:
        return SCHEDULES.get("1f1b")(shape=shape)
    return SCHEDULES.get(options.type)(options, shape=shape)


def uses_profile(config: ExtConfig) -> bool:
    """Whether the recompute policy needs measurements, which this host does not take yet."""
    return config.recompute is not None and issubclass(POLICIES.get(config.recompute.policy.type), ProfiledPolicy)


def schedule_type(config: ExtConfig) -> str:
    """Name of the configured schedule."""
    return "1f1b" if config.pipeline is None else config.pipeline.schedule.type


def splits_backward(config: ExtConfig) -> bool:
    """Whether the configured schedule runs I and W apart."""
    schedule = make_schedule(config, _SAMPLE)
    return any(action.kind is W for rank in range(_SAMPLE.num_ranks) for action in schedule.order(rank))


def forward_plan(layers_per_stage: Sequence[int], num_microbatches: int) -> Plan:
    """Forwards only, for evaluation."""
    num_stages = len(layers_per_stage)
    rank_of = placement.linear(num_stages)
    orders = [[Action(rank, F, i) for i in range(num_microbatches)] for rank in range(num_stages)]
    return Plan(
        schedule="forward",
        num_microbatches=num_microbatches,
        rank_of=rank_of,
        orders=add_communication(orders, rank_of),
        layers_per_stage=tuple(layers_per_stage),
        recomputed_layers=(0,) * num_stages,
    )


def summary(resolution: Resolution) -> str:
    """The one line that rank 0 prints at start."""
    plan = resolution.plan
    return (
        f"megatron-deepspeed-ext {ext.__version__} on megatron-core {version('megatron-core')}: "
        f"schedule {plan.schedule}, {plan.num_ranks} ranks x {plan.num_microbatches} micro-batches, "
        f"layers per stage {_list(plan.layers_per_stage)}, recompute {resolution.policy}, "
        f"recomputed layers {_list(plan.recomputed_layers)}, plan {plan.hash}"
    )


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
