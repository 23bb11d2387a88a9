"""The nearest change that fits, for a pipeline that does not fit its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

from ext.core.errors import InfeasibleError
from ext.cost.profile import LOSS
from ext.pipeline.costs import SplitMemory
from ext.pipeline.memory_table import amount
from ext.pipeline.partition import recompute_aware
from ext.pipeline.schedule import SCHEDULES, Schedule
from ext.pipeline.stage_model import PipelineProfile, StageModel
from ext.recompute.stage_aware import BudgetError, StageAware, smallest_budgets


def nearest_change(
    schedule: Schedule, profile: PipelineProfile, budgets: Sequence[float], *, moves_layers: bool = True
) -> str:
    """What to write into the config so that every stage keeps within its budget.

    Tried in this order: other recomputed layers, moved layers, the schedule that holds least, a smaller micro-batch.

    Args:
        schedule: in use.
        profile: of the pipeline as it is.
        budgets: bytes that each stage may hold.
        moves_layers: whether the config can place layers.
    """
    change = next(_fitting_changes(schedule, profile, budgets, moves_layers), None)
    if change is not None:
        return f"Nearest change that fits: {change}."
    least = smallest_budgets(schedule, profile.models(schedule.may_recompute), budgets)
    return (
        f"No other recomputation, layout or schedule fits, nor an eighth of the micro-batch. Smallest budgets by "
        f"stage: {', '.join(map(amount, least))}. Use more stages or ZeRO 1."
    )


def _fitting_changes(
    schedule: Schedule, profile: PipelineProfile, budgets: Sequence[float], moves_layers: bool
) -> Iterator[str]:
    models = profile.models(schedule.may_recompute)
    yield from _recomputing(schedule, models, budgets)
    if moves_layers:
        yield from _moving(schedule, profile, budgets)
    plain = SCHEDULES.get("1f1b")(shape=schedule.shape)
    models = profile.models(plain.may_recompute)
    if schedule.config.type != "1f1b":
        for change in _recomputing(plain, models, budgets):
            yield f"ext.pipeline.schedule '1f1b' with {change}"
    for share in (2, 4, 8):
        for change in _recomputing(plain, [_smaller(m, profile, s, share) for s, m in enumerate(models)], budgets):
            yield f"1/{share} of the micro-batch, with ext.pipeline.schedule '1f1b' and {change}"


def _recomputing(schedule: Schedule, models: Sequence[StageModel], budgets: Sequence[float]) -> Iterator[str]:
    try:
        choice = StageAware().choose(schedule, models, budgets)
    except BudgetError:
        return
    yield f"ext.recompute.policy {list(choice.recomputed_layers)}"


def _moving(schedule: Schedule, profile: PipelineProfile, budgets: Sequence[float]) -> Iterator[str]:
    """Layers moved between stages."""
    layers = [layer for stage in profile.stages for layer in stage.layers]
    loss = layers.pop() if layers[-1].name == LOSS else None
    try:
        layout = recompute_aware(
            schedule,
            layers,
            loss,
            profile.state_bytes,
            budgets,
            max_unfinished_sends=profile.max_unfinished_sends,
        )
    except InfeasibleError:
        return
    counts = [stop - start for start, stop in zip(layout.bounds, layout.bounds[1:], strict=False)]
    yield f"ext.pipeline.partition {counts} with ext.recompute.policy {list(layout.recomputed_layers)}"


def _smaller(model: StageModel, profile: PipelineProfile, stage: int, share: int) -> StageModel:
    """The stage where everything that grows with the micro-batch is a share of what it was."""
    states = profile.states(stage).total
    costs = tuple(
        replace(
            cost,
            activations=cost.activations / share,
            dropped=cost.dropped / share,
            stash=cost.stash / share,
            working_set=cost.working_set / share,
            split=None if cost.split is None else SplitMemory(*(size / share for size in astuple(cost.split))),
        )
        for cost in model.costs
    )
    return StageModel(costs, states + (model.fixed - states) / share)
