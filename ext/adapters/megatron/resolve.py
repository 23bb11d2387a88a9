"""From the config to the plan that the forward-backward function runs; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from ext.config import ExtConfig
from ext.config.decide import Decision, decide, make_schedule, reads_plan_file
from ext.core.errors import ConfigError
from ext.pipeline import placement
from ext.pipeline.actions import F
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.stage_model import PipelineProfile
from ext.recompute.pipeline_tables import UnitCostsOfStages

_SAMPLE = PipelineShape(num_ranks=2, num_microbatches=8)


def resolve(
    config: ExtConfig,
    layers_per_stage: Sequence[int],
    num_microbatches: int,
    profile: PipelineProfile | None = None,
    budgets: Sequence[int] | None = None,
    units: UnitCostsOfStages | None = None,
    *,
    splits_backward: bool = True,
) -> Decision:
    """Build the plan; see `decide`. Every transformer layer can be recomputed.

    Raises:
        ConfigError: the schedule or the policy cannot work with these stages, layers or micro-batches, or on Megatron.
    """
    decision = decide(
        config,
        layers_per_stage,
        layers_per_stage,
        num_microbatches,
        profile,
        budgets,
        splits_backward=splits_backward,
        units=units,
    )
    _refuse(decision.plan)
    return decision


def runs_plans(config: ExtConfig) -> bool:
    """Whether this package's forward-backward function takes the place of Megatron's."""
    return config.needs_pipeline_model or config.watchdog is not None


def schedule_type(config: ExtConfig) -> str:
    """Name of the configured schedule."""
    return "1f1b" if config.pipeline is None else config.pipeline.schedule.type


def splits_backward(config: ExtConfig, shape: PipelineShape | None = None) -> bool:
    """Whether the configured schedule runs I and W apart; False for a search, which does so only where it can.

    Raises:
        ConfigError: the schedule is that of a file that cannot be read, or that is for another shape.
    """
    if reads_plan_file(config) and shape is None:
        return False
    return make_schedule(config, shape or _SAMPLE).splits_backward


def _refuse(plan: Plan) -> None:
    """What Megatron's model chunks and data iterators cannot do."""
    if plan.rank_of != placement.linear(plan.num_ranks):
        raise ConfigError(
            f"ext.pipeline.schedule: '{plan.schedule}' puts its stages on the ranks {list(plan.rank_of)}; on Megatron "
            "rank r holds stage r and no other. Use another schedule."
        )
    for rank in range(plan.num_ranks):
        forwards = [action.microbatch for action in plan.orders[rank] if action.kind is F]
        if forwards != sorted(forwards):
            raise ConfigError(
                f"ext.pipeline.schedule: '{plan.schedule}' runs the forwards of rank {rank} in the order {forwards}; "
                "Megatron's data iterator gives micro-batches in ascending order only. Use another schedule."
            )
