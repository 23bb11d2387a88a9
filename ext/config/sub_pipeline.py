"""What ``ext.tensor_parallel.sub_pipeline`` cannot work with."""

from __future__ import annotations

from collections.abc import Iterator

from ext.config.model import ExtConfig
from ext.config.problems import Problem
from ext.pipeline.plan import Plan
from ext.pipeline.schedule import SCHEDULES

KEY = "ext.tensor_parallel.sub_pipeline"
_INSTEAD = 'Set "recompute": {"policy": "none"}, or remove the key'


def num_parts(config: ExtConfig) -> int:
    """Parts into which a micro-batch is cut."""
    return 1 if config.tensor_parallel is None else config.tensor_parallel.sub_pipeline


def sub_pipeline_problems(config: ExtConfig, micro_batch: int | None) -> Iterator[Problem]:
    """Before launch; ``micro_batch`` is None where unknown."""
    if num_parts(config) == 1:
        return
    schedule = "1f1b" if config.pipeline is None else config.pipeline.schedule.type
    found = None
    if config.recompute is not None and config.recompute.policy.type != "none":
        found = f"ext.recompute.policy is '{config.recompute.policy.type}'"
    elif config.recompute is None and SCHEDULES.get(schedule).recomputes_by_default:
        found = f"the schedule '{schedule}' recomputes them unless told otherwise"
    if found is not None:
        yield Problem(KEY, f"2 keeps all activations of its layers, {found}. {_INSTEAD}.")
    if micro_batch == 1:
        yield Problem(
            KEY,
            "2 cuts a micro-batch in two, train_micro_batch_size_per_gpu is 1. Use 2 or more samples, or remove the "
            "key.",
        )


def plan_problem(config: ExtConfig, plan: Plan) -> str | None:
    """Why a plan cannot be run; None where it can."""
    if num_parts(config) == 1 or not any(plan.recomputed_layers):
        return None
    return (
        f"{KEY}: 2 keeps all activations of its layers, the plan recomputes {list(plan.recomputed_layers)} layers per "
        f"stage. {_INSTEAD}."
    )
