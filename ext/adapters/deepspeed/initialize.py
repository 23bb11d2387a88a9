"""ext.initialize for DeepSpeed: everything that can be refused is refused before any collective of ours."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.constants import USE_DATA_BEFORE_EXPERT_PARALLEL
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

import patches
from ext.adapters.deepspeed import moe, resolve, sub_pipeline
from ext.adapters.deepspeed.engine import PlanPipelineEngine
from ext.adapters.deepspeed.layers import LayerInventory
from ext.adapters.deepspeed.placement import PlacedPipelineModule, placement_problem
from ext.config import ExtConfig, check_config
from ext.config.budget import missing_budget
from ext.config.decide import reads_plan_file
from ext.config.source import read_ds_config
from ext.config.sub_pipeline import num_parts
from ext.core.errors import ConfigError
from ext.core.launch_env import check_launch_environment
from ext.core.versions import deepspeed_refusal
from ext.pipeline.memory_table import StageMemory
from ext.pipeline.plan_file import read_plan
from ext.recompute.stage_report import StageRecompute
from ext.runtime.guard import FailureGuard

# The patch deepspeed_initialize may put our own function in its place later.
_host_initialize = deepspeed.initialize


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """See `ext.initialize`."""
    sample_batch = kwargs.pop("sample_batch", None)
    bound = inspect.signature(_host_initialize).bind(*args, **kwargs)
    arguments = bound.arguments
    raw = _config_of(arguments)
    config = None if raw is None else ExtConfig.from_ds_config(raw)
    if config is None or arguments.get("model") is None:
        return _host_initialize(*args, **kwargs)
    assert raw is not None
    _refuse_what_cannot_work(arguments["model"], config, raw)
    if config.moe is not None:
        moe.convert(arguments["model"], config.moe.router)
        moe.create_groups(arguments["model"], bool(raw.get(USE_DATA_BEFORE_EXPERT_PARALLEL)))
    arguments["model_parameters"] = _with_something_to_train(arguments)
    with patches.applied("deepspeed_pipeline_engine"):
        result = _host_initialize(*bound.args, **bound.kwargs)
    engine = result[0]
    if config.moe is not None:
        moe.connect(engine, config.moe.dispatcher, config.moe.topology.ranks_per_node)
    if sample_batch is not None and isinstance(engine, PlanPipelineEngine):
        engine.memory.decide_from(sample_batch)
    resolution = getattr(engine, "resolution", None)
    if resolution is not None or config.moe is not None:
        _write_together(engine, config, resolution)
    if engine.global_rank == 0 and (resolution is not None or config.moe is not None):
        print(resolve.summary(config, resolution), file=sys.stderr, flush=True)  # noqa: T201 - the promised line
    return result


def _write_together(engine: Any, config: ExtConfig, resolution: Any) -> None:
    """Rank 0 writes the resolved config; where it cannot, that is the same error on every rank."""
    error: ConfigError | None = None
    if engine.global_rank == 0:
        try:
            resolve.write_resolved(config, resolution)
        except ConfigError as refused:
            error = refused
    guard = getattr(engine, "guard", None) or FailureGuard()
    guard.start_step()
    guard.agree(error)


def memory_report(engine: Any) -> list[StageMemory]:
    """See `ext.memory_report`."""
    return list(engine.memory.rows) if isinstance(engine, PlanPipelineEngine) else []


def recompute_report(engine: Any) -> list[StageRecompute]:
    """See `ext.recompute_report`."""
    return engine.recompute_report() if isinstance(engine, PlanPipelineEngine) else []


def describe(engine: Any) -> dict[str, Any]:
    """See `ext.describe`."""
    dispatcher = moe.describe(engine)
    if not isinstance(engine, PlanPipelineEngine):
        inactive = ("schedule", "policy", "partition", "plan_hash", "orders", "recomputes")
        return {"active": dispatcher is not None, **dict.fromkeys(inactive), "dispatcher": dispatcher}
    plan, config = engine.plan, engine.ext_config
    return {
        "active": True,
        "schedule": plan.schedule,
        "policy": engine.resolution.policy,
        "partition": {
            "type": "module" if config.pipeline is None else config.pipeline.partition.type,
            "layers_per_stage": list(plan.layers_per_stage),
        },
        "dispatcher": dispatcher,
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
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    problems = check_launch_environment(os.environ, world_size=world_size)
    refusal = deepspeed_refusal(deepspeed.__version__)
    if refusal is not None:
        problems.append(refusal)
    if not isinstance(model, PipelineModule):
        keys = ("pipeline", "recompute", "tensor_parallel", "trace")
        blocks = [f"ext.{key}" for key in keys if getattr(config, key) is not None]
        if blocks:
            problems.append(
                f"{', '.join(blocks)}: needs a pipeline model, found {type(model).__name__}. Build a "
                "deepspeed.pipe.PipelineModule, or remove the block."
            )
        if config.moe is not None:
            problems += moe.problems(model)
        raise_if_any(problems)
        return
    if isinstance(model, DualPipeVModule):
        problems.append(
            "ext: a DualPipeVModule brings a schedule of its own. Use a PipelineModule, or remove the block."
        )
    inventory = LayerInventory.of(model)
    num_stages = model.num_stages
    problems += [
        f"{problem.key}: {problem.message}"
        for problem in check_config(
            raw,
            world_size=model.world_size,
            pipeline_stages=num_stages,
            tensor_parallel=model._grid.get_slice_parallel_world_size(),
            num_layers=None if isinstance(model, PlacedPipelineModule) else len(inventory.names),
        )
    ]
    problems += filter(None, (placement_problem(model, config), missing_budget(config, on_cpu=_is_on_cpu())))
    if num_parts(config) > 1:
        problems += sub_pipeline.problems(model)
    problems += [
        f"stage {stage} has no layers: {len(inventory.names)} layers on {num_stages} stages, bounds "
        f"{list(inventory.bounds)}. Use fewer stages or another partition_method."
        for stage, count in enumerate(inventory.layers_per_stage)
        if count == 0
    ]
    if config.moe is not None:
        problems += moe.problems(model, num_stages or 1)
    if reads_plan_file(config):
        problems = _on_all_ranks(problems, config)
    raise_if_any(problems)


def _on_all_ranks(problems: list[str], config: ExtConfig) -> list[str]:
    """The problems of all ranks, whose nodes may hold different files. Collective over the world."""
    options = None if config.pipeline is None else config.pipeline.schedule
    found = None if problems else read_plan(options.path).hash  # type: ignore[union-attr]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (problems, found))
    together = list(dict.fromkeys(problem for mine, _ in everyone for problem in mine))
    hashes = {rank: hash for rank, (_, hash) in enumerate(everyone) if hash is not None}
    if not together and len(set(hashes.values())) > 1:
        shown = ", ".join(f"rank {rank}: {hash}" for rank, hash in hashes.items())
        together.append(f"ext.pipeline.schedule: the plan file differs between ranks ({shown}). Give all one file.")
    return together


def _is_on_cpu() -> bool:
    device: Any = get_accelerator()
    return device.device_name() == "cpu"


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
