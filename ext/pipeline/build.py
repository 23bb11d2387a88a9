"""From a schedule and a layout to a validated plan."""

from __future__ import annotations

from collections.abc import Sequence

from ext.core.errors import ConfigError, ScheduleError
from ext.pipeline.actions import Action, F
from ext.pipeline.passes import DEFAULT_LOOKAHEAD, add_communication
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import Schedule
from ext.pipeline.validate import check_communication, check_compute, check_progress


def build_plan(
    schedule: Schedule,
    *,
    layers_per_stage: Sequence[int],
    recomputed_layers: Sequence[int],
    lookahead: int = DEFAULT_LOOKAHEAD,
) -> Plan:
    """Run the passes over a schedule's orders and prove the result.

    Args:
        schedule: made for its shape and, where it adapts, its costs.
        layers_per_stage: layers of each stage, by stage.
        recomputed_layers: how many of these are recomputed, by stage; a stage with 0 gets no R.
        lookahead: how many compute actions ahead of its use a receive is posted.

    Raises:
        ConfigError: layers that do not fit the schedule's stages.
        ScheduleError: the schedule's orders do not make a valid plan.
    """
    _check_layers(schedule, layers_per_stage, recomputed_layers)
    recomputing = frozenset(stage for stage, count in enumerate(recomputed_layers) if count)
    ranks = range(schedule.shape.num_ranks)
    return plan_of_orders(
        schedule.config.type,
        [schedule.actions(rank, recomputing) for rank in ranks],
        rank_of=schedule.rank_of,
        num_microbatches=schedule.shape.num_microbatches,
        layers_per_stage=layers_per_stage,
        recomputed_layers=recomputed_layers,
        max_in_flight=[schedule.max_in_flight(rank) for rank in ranks],
        lookahead=lookahead,
    )


def plan_of_orders(
    name: str,
    orders: Sequence[Sequence[Action]],
    *,
    rank_of: Sequence[int],
    num_microbatches: int,
    layers_per_stage: Sequence[int],
    recomputed_layers: Sequence[int],
    max_in_flight: Sequence[int] | None = None,
    lookahead: int = DEFAULT_LOOKAHEAD,
) -> Plan:
    """Add communication to finished compute orders and prove the result.

    Args:
        name: of the schedule.
        orders: compute actions of every rank, R included, by rank.
        rank_of: rank of each stage, by stage.
        num_microbatches: per step.
        layers_per_stage: layers of each stage, by stage.
        recomputed_layers: how many of these are recomputed, by stage.
        max_in_flight: bound of each rank on micro-batches in flight, where there is one.
        lookahead: how many compute actions ahead of its use a receive is posted.

    Raises:
        ScheduleError: the orders do not make a valid plan.
    """

    for rank, order in enumerate(orders):
        extra = [str(action) for action in order if not action.kind.is_compute]
        if extra:
            raise ScheduleError(
                f"schedule '{name}' communicates on rank {rank}: {' '.join(extra)}. Leave that to the passes."
            )

    def plan_of(orders: tuple) -> Plan:
        return Plan(
            schedule=name,
            num_microbatches=num_microbatches,
            rank_of=tuple(rank_of),
            orders=orders,
            layers_per_stage=tuple(layers_per_stage),
            recomputed_layers=tuple(recomputed_layers),
        )

    check_compute(plan_of(tuple(map(tuple, orders))), max_in_flight)
    plan = plan_of(add_communication(orders, rank_of, lookahead=lookahead))
    check_communication(plan)
    check_progress(plan)
    return plan


def forward_plan(rank_of: Sequence[int], layers_per_stage: Sequence[int], num_microbatches: int) -> Plan:
    """Forwards only, for evaluation.

    Args:
        rank_of: rank of each stage, by stage.
        layers_per_stage: layers of each stage, by stage.
        num_microbatches: that each stage runs.
    """
    orders: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    for microbatch in range(num_microbatches):
        for stage, rank in enumerate(rank_of):
            orders[rank].append(Action(stage, F, microbatch))
    return Plan(
        schedule="forward",
        num_microbatches=num_microbatches,
        rank_of=tuple(rank_of),
        orders=add_communication(orders, rank_of),
        layers_per_stage=tuple(layers_per_stage),
        recomputed_layers=(0,) * len(rank_of),
    )


def default_recompute(schedule: Schedule, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Recomputed layers per stage where the user asks for nothing: the schedule's own policy."""
    if schedule.recomputes_by_default:
        return full_recompute(schedule, layers_per_stage)
    return (0,) * len(layers_per_stage)


def full_recompute(schedule: Schedule, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Every layer, except on stages that the schedule's definition keeps whole."""
    return tuple(n if schedule.may_recompute(stage) else 0 for stage, n in enumerate(layers_per_stage))


def _check_layers(schedule: Schedule, layers: Sequence[int], recomputed: Sequence[int]) -> None:
    name, num_stages = schedule.config.type, len(schedule.rank_of)
    problems = [
        f"{what} lists {len(counts)} stages, schedule '{name}' has {num_stages}; give one number per stage."
        for what, counts in (("layers_per_stage", layers), ("recomputed_layers", recomputed))
        if len(counts) != num_stages
    ]
    for stage, (total, again) in enumerate(zip(layers, recomputed, strict=False)):
        if total < 1:
            problems.append(f"stage {stage} has {total} layers; every stage needs at least one.")
        elif not 0 <= again <= total:
            problems.append(f"stage {stage} recomputes {again} of {total} layers; give 0 to {total}.")
        elif again and not schedule.may_recompute(stage):
            problems.append(
                f"stage {stage} recomputes {again} layers, but schedule '{name}' never recomputes there; "
                f"set it to 0 or use the schedule '1f1b'."
            )
    if problems:
        raise ConfigError(*problems)
