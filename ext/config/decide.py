"""What the ``"ext"`` block means for a pipeline: its schedule, its budgets, its recomputed layers. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from ext.config.model import ExtConfig
from ext.core.errors import ConfigError
from ext.cost.profile import LayerProfile
from ext.cost.states import StateBytes
from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.memory_table import GIB, amount
from ext.pipeline.partition import Bounds, Parts
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.plan_file import read_content
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.pipeline.schedules.auto import Auto
from ext.pipeline.schedules.plan_file import PlanFile
from ext.pipeline.stage_model import PipelineProfile
from ext.planner.search.search import Chosen, search
from ext.planner.search.space import Space, fixed_stages
from ext.planner.search.units import UnitProblem, search_units
from ext.recompute.lynx import UnitPolicy
from ext.recompute.pipeline_tables import PipelineTables, UnitCostsOfStages, choose_tables
from ext.recompute.policy import POLICIES, PerStageRecompute, ProfiledPolicy
from ext.recompute.stage_aware import BudgetError, Choice, LayerPolicy
from ext.recompute.tables_file import read_tables

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
        chosen: what a search found, where one made the plan.
        tables: what a unit policy decided, once it did.
    """

    schedule: Schedule
    plan: Plan
    policy: str
    chosen: Chosen | None = None
    tables: PipelineTables | None = None


def decide(
    config: ExtConfig,
    layers_per_stage: Sequence[int],
    recomputable: Sequence[int],
    num_microbatches: int,
    profile: PipelineProfile | None = None,
    budgets: Sequence[int] | None = None,
    *,
    splits_backward: bool = True,
    units: UnitCostsOfStages | None = None,
) -> Decision:
    """Build the plan. Needs no communication: where its arguments are the same on every rank, so is the plan.

    A search or a solver that the clock ended may differ: see `decides_by_search`.

    Args:
        config: the user's.
        layers_per_stage: layers of each stage.
        recomputable: how many of these can be recomputed.
        num_microbatches: per step.
        profile: of the stages, once there is one; policies that need it recompute everything until then.
        budgets: bytes that each stage may hold, with the profile.
        splits_backward: whether a search may let weight gradients wait.
        units: costs of the layers' units, with the profile, for policies that decide about these.

    Raises:
        ConfigError: the schedule or the policy cannot work with these stages, layers or micro-batches.
    """
    schedule = make_schedule(config, PipelineShape(len(layers_per_stage), num_microbatches))
    if isinstance(schedule, PlanFile):
        return _from_file(config, schedule, layers_per_stage, recomputable, profile)
    if isinstance(schedule, Auto) and profile is not None:
        return _by_search(config, schedule, layers_per_stage, profile, budgets, splits_backward, units)
    may_recompute = [schedule.may_recompute(stage) for stage in range(len(recomputable))]
    if config.recompute is None:
        recomputed = default_recompute(schedule, recomputable)
        policy = "full (the schedule's own)" if schedule.recomputes_by_default else "none (the schedule's own)"
    else:
        options = config.recompute.policy
        chosen = POLICIES.get(options.type)(options)
        recomputed = chosen.recomputed_layers(recomputable, may_recompute)
        policy = f"{options.type} (ext.recompute)"
        if isinstance(chosen, UnitPolicy) and profile is not None and budgets is not None:
            known = _known(units, options.type)
            return _by_units(config, chosen, schedule, layers_per_stage, profile, known, budgets)
        if isinstance(chosen, LayerPolicy) and profile is not None and budgets is not None:
            choice = _choose(chosen, schedule, profile, budgets)
            schedule, recomputed = choice.schedule, choice.recomputed_layers
        elif isinstance(chosen, ProfiledPolicy):
            policy = f"{options.type} (ext.recompute; full until the first train_batch decides)"
    plan = build_plan(schedule, layers_per_stage=layers_per_stage, recomputed_layers=recomputed)
    return Decision(schedule, plan, policy)


def _known(units: UnitCostsOfStages | None, policy: str) -> UnitCostsOfStages:
    if units is None:
        raise ConfigError(
            f"ext.recompute.policy: '{policy}' needs measured costs of the layers' units, which are not known here. "
            "Use 'stage_aware', which decides about whole layers."
        )
    return units


def _by_units(
    config: ExtConfig,
    policy: UnitPolicy,
    schedule: Schedule,
    layers_per_stage: Sequence[int],
    profile: PipelineProfile,
    units: UnitCostsOfStages,
    budgets: Sequence[int],
) -> Decision:
    assert config.recompute is not None
    with _naming_budgets():
        tables = choose_tables(
            schedule,
            profile,
            units,
            budgets,
            policy.solve,
            layers_per_stage=layers_per_stage,
            overlap=config.recompute.overlap is not False,
            show=amount,
        )
    return Decision(tables.schedule, tables.plan, f"{config.recompute.policy.type} (ext.recompute)", tables=tables)


def _from_file(
    config: ExtConfig,
    schedule: PlanFile,
    layers_per_stage: Sequence[int],
    recomputable: Sequence[int],
    profile: PipelineProfile | None,
) -> Decision:
    """The plan of a file, which decides what is recomputed too."""
    plan, path = schedule.plan, schedule.config.path
    problems = []
    if plan.layers_per_stage != tuple(layers_per_stage):
        problems.append(
            f"ext.pipeline.schedule: the plan in {path} is for {list(plan.layers_per_stage)} layers per stage, the "
            f"module has {list(layers_per_stage)}. Place the layers as the plan has them, or make the plan again."
        )
    problems += [
        f"ext.pipeline.schedule: the plan in {path} recomputes {asked} layers on stage {stage}, {most} can be."
        for stage, (asked, most) in enumerate(zip(plan.recomputed_layers, recomputable, strict=False))
        if asked > most
    ]
    if config.recompute is not None and not leaves_recompute_open(config):
        problems.append(
            f"ext.recompute.policy: the plan in {path} says what is recomputed. Remove the policy '"
            f"{config.recompute.policy.type}', or name a schedule."
        )
    if problems:
        raise ConfigError(*problems)
    tables = None
    if plan.unit_tables:
        try:
            tables = read_tables(read_content(path), plan, schedule, profile and profile.stages)
        except ConfigError as error:
            raise ConfigError(*(f"ext.pipeline.schedule: {path}: {problem}" for problem in error.problems)) from None
    return Decision(schedule, plan, "as in the plan's file", tables=tables)


def place_by_search(
    config: ExtConfig,
    schedule: Auto,
    layers: Sequence[LayerProfile],
    loss: LayerProfile | None,
    states: StateBytes,
    budgets: Sequence[float],
    start: Bounds,
    num_devices: float = math.inf,
) -> Bounds:
    """Where a search for the schedule `auto` puts the layers when these may move too.

    Args:
        config: the user's.
        schedule: of the pipeline.
        layers: of the whole model.
        loss: what the last stage computes behind its layers.
        states: bytes of parameters, gradients and optimizer.
        budgets: bytes that each rank may hold, by stage.
        start: a layout to begin with.
        num_devices: that all ranks of the pipeline share.

    Raises:
        BudgetError: nothing that was tried keeps the budgets.
    """
    parts = Parts(layers, loss, len(budgets), states)
    counts = tuple(stop - first for first, stop in zip(start, start[1:], strict=False))
    recompute = _fixed_recompute(config)
    space = Space(
        models=lambda rank, first, stop: parts.model(first, stop, may_recompute=True),
        layers_per_stage=counts,
        num_microbatches=schedule.shape.num_microbatches,
        budgets=tuple(budgets),
        moves_layers=not isinstance(recompute, tuple),
        recompute=recompute,
        num_devices=num_devices,
    )
    return tuple(accumulate(_searched(config, schedule, space).layout.layers, initial=0))


def _by_search(
    config: ExtConfig,
    schedule: Auto,
    layers_per_stage: Sequence[int],
    profile: PipelineProfile,
    budgets: Sequence[int] | None,
    splits_backward: bool,
    units: UnitCostsOfStages | None,
) -> Decision:
    """What the search finds on the module's own layout; without budgets memory is taken to be enough."""
    stages = profile.models(lambda stage: True)
    space = Space(
        models=fixed_stages(stages),
        layers_per_stage=tuple(layers_per_stage),
        num_microbatches=schedule.shape.num_microbatches,
        budgets=tuple(map(float, budgets)) if budgets is not None else (math.inf,) * len(stages),
        moves_layers=False,
        recompute=_fixed_recompute(config),
        splits_backward=splits_backward,
        num_devices=profile.num_devices,
    )
    if decides_about_units(config) and budgets is not None:
        assert config.recompute is not None
        options = config.recompute.policy
        policy = POLICIES.get(options.type)(options)
        assert isinstance(policy, UnitPolicy)
        costs, overlap = _known(units, options.type), config.recompute.overlap is not False
        problem = UnitProblem(schedule, profile, costs, tuple(budgets), policy.solve, overlap)
        with _naming_budgets():
            chosen, tables = search_units(space, problem, **_search_options(config, schedule))
        whole = "" if tables is not None else ": whole layers, which are as fast"
        return Decision(schedule, chosen.plan, f"{options.type} (auto{whole})", chosen, tables)
    chosen = _searched(config, schedule, space)
    kept = "as searched" if leaves_recompute_open(config) or config.recompute is None else config.recompute.policy.type
    return Decision(schedule, chosen.plan, f"{kept} (auto)", chosen)


def _searched(config: ExtConfig, schedule: Auto, space: Space) -> Chosen:
    with _naming_budgets():
        return search(space, **_search_options(config, schedule))


def _search_options(config: ExtConfig, schedule: Auto) -> dict[str, Any]:
    assert config.pipeline is not None
    options = schedule.config
    return {"seconds": options.search_seconds, "seed": options.seed, "tolerance": config.pipeline.tolerance}


@contextmanager
def _naming_budgets() -> Iterator[None]:
    """Budgets that cannot be kept are told under their key."""
    try:
        yield
    except BudgetError as error:
        first, *rest = error.problems
        raise BudgetError(f"{BUDGET_KEY}: {first}", *rest) from None


def _fixed_recompute(config: ExtConfig) -> Literal["open", "none", "all"] | tuple[int, ...]:
    """What the recompute block fixes for a search."""
    if config.recompute is None or leaves_recompute_open(config):
        return "open"
    options = config.recompute.policy
    if isinstance(options, PerStageRecompute.Config):
        return options.layers
    return "none" if options.type == "none" else "all"


def leaves_recompute_open(config: ExtConfig) -> bool:
    """Whether the recompute block names a policy that decides by measured layers."""
    return config.recompute is not None and issubclass(POLICIES.get(config.recompute.policy.type), ProfiledPolicy)


def decides_by_search(config: ExtConfig) -> bool:
    """Whether `decide` searches or solves within a time limit: then one rank decides for all."""
    searches = config.pipeline is not None and isinstance(config.pipeline.schedule, Auto.Config)
    return searches or decides_about_units(config)


def decides_about_units(config: ExtConfig) -> bool:
    """Whether the recompute policy decides unit by unit, so that the costs of units must be known."""
    recompute = config.recompute
    by_units = recompute is not None and issubclass(POLICIES.get(recompute.policy.type), UnitPolicy)
    return by_units and not reads_plan_file(config)


def reads_plan_file(config: ExtConfig) -> bool:
    """Whether the plan comes from a file, which may not be the same on every node."""
    return config.pipeline is not None and isinstance(config.pipeline.schedule, PlanFile.Config)


def _choose(policy: LayerPolicy, schedule: Schedule, profile: PipelineProfile, budgets: Sequence[int]) -> Choice:
    with _naming_budgets():
        return policy.choose(schedule, profile.models(schedule.may_recompute), budgets, amount)


def make_schedule(config: ExtConfig, shape: PipelineShape) -> Schedule:
    """The configured schedule; 1f1b where the config names none."""
    options = None if config.pipeline is None else config.pipeline.schedule
    if options is None:
        return SCHEDULES.get("1f1b")(shape=shape)
    return SCHEDULES.get(options.type)(options, shape=shape)


def needs_profile(config: ExtConfig) -> bool:
    """Whether the config asks for what only a profile of the layers can tell: a search, a policy, a budget to keep."""
    recompute = config.recompute
    if decides_by_search(config):
        return True
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
