"""`python -m ext simulate --config`: a ds_config on a GPT of given shape, from formulas: times and memory per stage."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ext.config import ExtConfig, check_config, read_ds_config
from ext.config.batch import read_batch
from ext.config.check import Launch, microbatches_per_step
from ext.config.decide import allowed_counts, budgets_in_bytes, decide, make_schedule
from ext.config.states import precision, state_bytes
from ext.core.errors import ConfigError, InfeasibleError, nearest
from ext.cost.gpt import gpt_profile
from ext.cost.hardware import DEVICES, Device
from ext.cost.profile import LayerProfile
from ext.cost.transformer import MODELS, TransformerShape, model_preset
from ext.pipeline.costs import Costs
from ext.pipeline.memory_table import StageMemory, amount, predict
from ext.pipeline.partition import Bounds, listed_bounds, recompute_aware, uniform_bounds
from ext.pipeline.plan import PipelineShape
from ext.pipeline.simulate import Simulation, simulate
from ext.pipeline.stage_model import PipelineProfile, Stage
from ext.recompute.advice import nearest_change
from ext.recompute.analytic import transformer_costs
from ext.recompute.units import LayerCosts


@dataclass(frozen=True)
class ConfigRequest:
    """The command's options as given.

    Attributes:
        config: the ds_config.
        model: name of a preset, or a JSON file with the fields of `TransformerShape`.
        device: name of a preset.
        stages: pipeline stages; by default those of the ds_config.
        world_size: ranks; one replica by default.
    """

    config: Path
    model: str
    device: str
    stages: int | None
    world_size: int | None


def run_config(request: ConfigRequest) -> tuple[Simulation, list[StageMemory]]:
    """Time in seconds and memory in bytes of one step.

    Raises:
        ConfigError: all that is wrong with the files and options.
        InfeasibleError: the budget cannot be kept.
    """
    ds_config = read_ds_config(request.config)
    stages = _stages(request, ds_config)
    world_size = stages if request.world_size is None else request.world_size
    shape, device = _shape(request.model, ds_config), _device(request.device)
    problems = [str(problem) for problem in check_config(ds_config, world_size=world_size, pipeline_stages=stages)]
    launch = Launch(world_size, stages)
    num_microbatches = microbatches_per_step(ds_config, launch)
    micro_batch = read_batch(ds_config)[0].completed(launch.data_parallel).micro
    if not problems and (num_microbatches is None or micro_batch is None):
        problems.append("train_micro_batch_size_per_gpu and gradient_accumulation_steps: missing; give both.")
    if problems or num_microbatches is None or micro_batch is None:
        raise ConfigError(*problems)
    config = ExtConfig.from_ds_config(ds_config) or ExtConfig.model_validate({})
    layers = gpt_profile(shape, micro_batch, device)
    states = state_bytes(ds_config, launch.data_parallel or 1)
    budgets = budgets_in_bytes(config, stages, device.memory_bytes)
    assert budgets is not None
    bounds = _bounds(config, layers, PipelineShape(stages, num_microbatches), states, budgets)
    parts = tuple(Stage(layers[a:b], is_last=b == len(layers)) for a, b in pairwise(bounds))
    profile = PipelineProfile(parts, states)
    block = unit_costs(shape, micro_batch, device, next(layer for layer in layers if layer.recomputable).forward)
    decision = decide(
        config,
        [b - a for a, b in pairwise(bounds)],
        [len(part.recomputable) for part in parts],
        num_microbatches,
        profile,
        budgets,
        units=[[block if layer.recomputable else None for layer in part.layers] for part in parts],
    )
    plan, tables = decision.plan, decision.tables
    whole = tuple(part.costs(count) for part, count in zip(parts, plan.recomputed_layers, strict=True))
    costs = Costs(whole if tables is None else tables.costs)
    rows = predict(plan, profile, budgets, costs.stages)
    over = [row for row in rows if row.exceeds]
    if over:
        raise InfeasibleError(
            "\n".join(f"stage {row.stage} needs {amount(row.total)}, it has {amount(row.budget or 0)}." for row in over)
            + f"\n{nearest_change(decision.schedule, profile, budgets)}"
        )
    return simulate(plan, costs), rows


def unit_costs(shape: TransformerShape, micro_batch: int, device: Device, forward: float) -> LayerCosts:
    """Of a transformer layer with fused attention, as `gpt_profile` has it: units that take ``forward`` in all."""
    costs = transformer_costs(shape, micro_batch=micro_batch, device=device, flash=True)
    scale = forward / costs.forward
    return replace(costs, units=tuple(replace(unit, time=scale * unit.time) for unit in costs.units))


def memory_json(rows: list[StageMemory]) -> list[dict[str, Any]]:
    """The table's figures in bytes, by stage."""
    return [
        {
            **asdict(row),
            "states": {**asdict(row.states), "total": row.states.total},
            "live": row.live,
            "total": row.total,
        }
        for row in rows
    ]


def _bounds(
    config: ExtConfig, layers: list[LayerProfile], shape: PipelineShape, states: Any, budgets: list[int]
) -> Bounds:
    """Where stages start; a partition that the user's own module decides counts as uniform."""
    partition = None if config.pipeline is None else config.pipeline.partition
    names = [layer.name for layer in layers]
    if partition is not None and partition.layers is not None:
        return listed_bounds(partition.layers, names)
    if partition is not None and partition.type == "recompute_aware":
        schedule = make_schedule(config, shape)
        allowed = allowed_counts(config, schedule)
        return recompute_aware(schedule, layers, None, states, budgets, allowed=allowed, show=amount).bounds
    return uniform_bounds(names, shape.num_ranks)


def _stages(request: ConfigRequest, ds_config: dict[str, Any]) -> int:
    block = ds_config.get("pipeline")
    stages = request.stages or (block.get("stages") if isinstance(block, dict) else None)
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError("--stages: missing, and the ds_config has no pipeline.stages; give the pipeline ranks.")
    return stages


def _shape(model: str, ds_config: dict[str, Any]) -> TransformerShape:
    """The model, with activations as wide as the config's precision has them."""
    width = 4 if precision(ds_config) == "fp32" else 2
    if not Path(model).is_file():
        try:
            return model_preset(model).model_copy(update={"bytes_per_element": width})
        except ConfigError as error:
            raise ConfigError(f"--model: {error} A JSON file with its shape does too.") from None
    try:
        return TransformerShape(**{"bytes_per_element": width, **json.loads(Path(model).read_text())})
    except (ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"--model: {model}: {error}. Presets: {', '.join(MODELS)}.") from error


def _device(name: str) -> Device:
    if name not in DEVICES:
        raise ConfigError(f"--device: unknown device '{name}'.{nearest(name, DEVICES)} Known: {', '.join(DEVICES)}.")
    return DEVICES[name]
