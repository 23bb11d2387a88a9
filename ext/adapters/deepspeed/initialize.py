"""ext.initialize for DeepSpeed: everything that can be refused is refused before any collective of ours."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from packaging.version import Version

from ext.adapters.deepspeed import resolve
from ext.adapters.deepspeed.engine import PlanPipelineEngine
from ext.adapters.deepspeed.layers import LayerInventory
from ext.config import ExtConfig, check_config
from ext.config.source import read_ds_config
from ext.core.errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST_DEEPSPEED = "0.19.8"


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """See `ext.initialize`."""
    bound = inspect.signature(deepspeed.initialize).bind(*args, **kwargs)
    arguments = bound.arguments
    raw = _config_of(arguments)
    config = None if raw is None else ExtConfig.from_ds_config(raw)
    if config is None:
        return deepspeed.initialize(*args, **kwargs)
    assert raw is not None
    _refuse_what_cannot_work(arguments["model"], config, raw)
    arguments["model_parameters"] = _with_something_to_train(arguments)
    with _plan_engine_in_place():
        result = deepspeed.initialize(*bound.args, **bound.kwargs)
    engine = result[0]
    if engine.global_rank == 0:
        resolve.write_resolved(config, engine.resolution)
        print(resolve.summary(engine.resolution), file=sys.stderr, flush=True)  # noqa: T201 - the promised line
    return result


def describe(engine: Any) -> dict[str, Any]:
    """See `ext.describe`."""
    if not isinstance(engine, PlanPipelineEngine):
        inactive = ("schedule", "policy", "partition", "dispatcher", "plan_hash", "orders", "recomputes")
        return {"active": False, **dict.fromkeys(inactive)}
    plan, config = engine.plan, engine.ext_config
    return {
        "active": True,
        "schedule": plan.schedule,
        "policy": engine.resolution.policy,
        "partition": {
            "type": "module" if config.pipeline is None else config.pipeline.partition.type,
            "layers_per_stage": list(plan.layers_per_stage),
        },
        "dispatcher": None,
        "plan_hash": plan.hash,
        "orders": dict(plan.to_json()),
        "recomputes": {str(stage): count for stage, count in engine.recomputes.items()},
    }


def _config_of(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ds_config as DeepSpeed will find it; None where DeepSpeed itself will complain."""
    config = arguments.get("config") or arguments.get("config_params")
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    return None if config is None else read_ds_config(config)


def _refuse_what_cannot_work(model: Any, config: ExtConfig, raw: dict[str, Any]) -> None:
    """All problems at once, on every rank alike.

    Raises:
        ConfigError: this DeepSpeed release, model, or combination of keys cannot work.
    """
    problems = []
    if Version(deepspeed.__version__) < Version(OLDEST_DEEPSPEED):
        problems.append(
            f"deepspeed {deepspeed.__version__} is installed, {OLDEST_DEEPSPEED} or newer is needed: older releases "
            "scale the gradients of pipeline stages wrongly. Run: pip install --upgrade deepspeed"
        )
    if not isinstance(model, PipelineModule):
        blocks = [f"ext.{key}" for key in ("pipeline", "recompute") if getattr(config, key) is not None]
        if blocks:
            problems.append(
                f"{', '.join(blocks)}: needs a pipeline model, found {type(model).__name__}. Build a "
                "deepspeed.pipe.PipelineModule, or remove the block."
            )
        raise_if_any(problems)
        return
    inventory = LayerInventory.of(model)
    num_stages = model.num_stages
    problems += [
        f"{problem.key}: {problem.message}"
        for problem in check_config(
            raw,
            world_size=model.world_size,
            pipeline_stages=num_stages,
            tensor_parallel=model._grid.get_slice_parallel_world_size(),
            num_layers=len(inventory.names),
        )
    ]
    problems += [
        f"stage {stage} has no layers: {len(inventory.names)} layers on {num_stages} stages, bounds "
        f"{list(inventory.bounds)}. Use fewer stages or another partition_method."
        for stage, count in enumerate(inventory.layers_per_stage)
        if count == 0
    ]
    raise_if_any(problems)


def raise_if_any(problems: list[str]) -> None:
    if problems:
        raise ConfigError(*problems)


def _with_something_to_train(arguments: Mapping[str, Any]) -> Any:
    """The parameters to train, with a stand-in on a wholly frozen stage: optimizers refuse to have none."""
    model, given = arguments["model"], arguments.get("model_parameters")
    parameters = list(model.parameters() if given is None else given)
    trained = [p for entry in parameters for p in (entry["params"] if isinstance(entry, dict) else [entry])]
    if any(parameter.requires_grad for parameter in trained):
        return parameters
    like = next(model.parameters(), torch.empty(0))
    return [torch.nn.Parameter(torch.zeros(1, device=like.device, dtype=like.dtype))]


@contextmanager
def _plan_engine_in_place() -> Iterator[None]:
    """`deepspeed.initialize` looks the engine class up by name when it is called; nothing else is touched."""
    original = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = PlanPipelineEngine
    try:
        yield
    finally:
        deepspeed.PipelineEngine = original
