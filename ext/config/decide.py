"""What the ``"ext"`` block means for a pipeline: its schedule, its budgets, its recomputed layers. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ext.config.model import ExtConfig
from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.memory_table import GIB, amount
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.pipeline.stage_model import PipelineProfile
from ext.recompute.policy import POLICIES, PerStageRecompute
from ext.recompute.stage_aware import BudgetError, Choice, ProfiledPolicy

BUDGET_KEY = "ext.recompute.memory_budget_gib"
DEFAULT_SHARE = 0.9
"""Share of the device's memory that is the budget where none is given."""


@dataclass(frozen=True)
class Decision:
    """A plan and where it comes from.

    Attributes:
        schedule: that the plan was made from.
        plan: orders, layout and recomputed layers.
        policy: name of the recompute policy in force, for people.
    """

    schedule: Schedule
    plan: Plan
    policy: str


def decide(
    config: ExtConfig,
    layers_per_stage: Sequence[int],
    recomputable: Sequence[int],
    num_microbatches: int,
    profile: PipelineProfile | None = None,
    budgets: Sequence[int] | None = None,
) -> Decision:
    """Build the plan. Needs no communication: where its arguments are the same on every rank, so is the plan.

    Args:
        config: the user's.
        layers_per_stage: layers of each stage.
        recomputable: how many of these can be recomputed.
        num_microbatches: per step.
        profile: of the stages, once there is one; policies that need it recompute everything until then.
        budgets: bytes that each stage may hold, with the profile.

    Raises:
        ConfigError: the schedule or the policy cannot work with these stages, layers or micro-batches.
    """
    schedule = make_schedule(config, PipelineShape(len(layers_per_stage), num_microbatches))
    may_recompute = [schedule.may_recompute(stage) for stage in range(len(recomputable))]
    if config.recompute is None:
        recomputed = default_recompute(schedule, recomputable)
        policy = "full (the schedule's own)" if schedule.recomputes_by_default else "none (the schedule's own)"
    else:
        options = config.recompute.policy
        chosen = POLICIES.get(options.type)(options)
        recomputed = chosen.recomputed_layers(recomputable, may_recompute)
        policy = f"{options.type} (ext.recompute)"
        if isinstance(chosen, ProfiledPolicy) and profile is not None and budgets is not None:
            choice = _choose(chosen, schedule, profile, budgets)
            schedule, recomputed = choice.schedule, choice.recomputed_layers
        elif isinstance(chosen, ProfiledPolicy):
            policy = f"{options.type} (ext.recompute; full until the first train_batch decides)"
    plan = build_plan(schedule, layers_per_stage=layers_per_stage, recomputed_layers=recomputed)
    return Decision(schedule, plan, policy)


def _choose(policy: ProfiledPolicy, schedule: Schedule, profile: PipelineProfile, budgets: Sequence[int]) -> Choice:
    try:
        return policy.choose(schedule, profile.models(schedule.may_recompute), budgets, amount)
    except BudgetError as error:
        first, *rest = error.problems
        raise BudgetError(f"{BUDGET_KEY}: {first}", *rest) from None


def make_schedule(config: ExtConfig, shape: PipelineShape) -> Schedule:
    """The configured schedule; 1f1b where the config names none."""
    options = None if config.pipeline is None else config.pipeline.schedule
    if options is None:
        return SCHEDULES.get("1f1b")(shape=shape)
    return SCHEDULES.get(options.type)(options, shape=shape)


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
