"""Turning the MoE layers of a model into ours before `deepspeed.initialize`, and connecting them after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from ext.adapters.deepspeed.moe_checkpoint import load_across_expert_sizes
from ext.adapters.deepspeed.moe_gate import top_k_problem
from ext.adapters.deepspeed.moe_layer import DispatchMoE, DispatchMOELayer, uneven_problem
from ext.adapters.deepspeed.moe_monitor import keep_biases, report_each_step
from ext.adapters.deepspeed.moe_norm import count_experts_once
from ext.adapters.deepspeed.moe_rerun import remember_under_checkpointing
from ext.comm.topology import RankGroup, rank_groups, topology_of
from ext.core.errors import ConfigError
from ext.moe.dispatcher import DISPATCHERS, DispatcherConfig
from ext.moe.dispatchers.base import Dispatcher
from ext.moe.router import RouterConfig
from ext.runtime.alarm import Alarm


def problems(model: nn.Module, num_stages: int = 1) -> list[str]:
    """Everything about the MoE layers of ``model`` that cannot work, by layer; the same on every rank.

    Collective over the world, where there is one: a rank of a pipeline sees its own layers only.

    Args:
        model: any module.
        num_stages: pipeline stages, to know the data-parallel size.
    """
    found = [problem for name, moe in _moe_layers(model) for problem in _problems(name, moe, num_stages)]
    if not dist.is_initialized():
        return found
    stage = model.stage_id if isinstance(model, PipelineModule) else 0
    layers = "; ".join(f"{name}: {moe.num_experts} experts, ep_size {moe.ep_size}" for name, moe in _moe_layers(model))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, stage, layers or "none"))
    return list(dict.fromkeys([problem for of_rank, *_ in everyone for problem in of_rank] + _differing(everyone)))


def convert(model: nn.Module, router: RouterConfig | None = None) -> None:
    """Replace the inside of every DeepSpeed MoE layer of ``model``; parameters and their names stay.

    Without communication; to be called before the engine is built, on every rank, where there are no `problems`.

    Args:
        model: any module, also a PipelineModule (this rank's layers).
        router: options for all routers; absent: as DeepSpeed has them.
    """
    config = RouterConfig() if router is None else router
    for name, moe in _moe_layers(model):
        if not isinstance(moe.deepspeed_moe, DispatchMOELayer):
            moe.deepspeed_moe = DispatchMOELayer(moe.deepspeed_moe, name, config)
            if type(moe) is MoE:
                # The object stays, since the model and a pipeline's list of layers may hold it elsewhere too.
                moe.__class__ = DispatchMoE


def create_groups(model: nn.Module, data_before_experts: bool = False) -> None:
    """Create DeepSpeed's expert groups on every rank of a pipeline, also where a stage has no MoE layer.

    DeepSpeed creates them on the ranks that have one, while torch needs all ranks to create a group. Collective
    over the world; to be called before the engine is built.
    """
    if not isinstance(model, PipelineModule):
        return
    sizes: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(sizes, [moe.ep_size for _, moe in _moe_layers(model)])
    for size in sorted({size for of_rank in sizes for size in of_rank}):
        groups._create_expert_and_data_parallel(
            size, pp_size=model.num_stages, use_data_before_expert_parallel_=data_before_experts
        )


def isolate(model: Any) -> None:
    """Let the MoE layers of ``model`` run on this rank alone, as if every other rank sent what this one does.

    For measuring layers that are thrown away afterwards, before there are process groups.
    """
    if not isinstance(model, nn.Module) or not all(_is_stock(moe.deepspeed_moe) for _, moe in _moe_layers(model)):
        return
    convert(model)
    for layer in _converted(model):
        ranks = range(layer.ep_size)
        group = RankGroup(None, topology_of(ranks, ["here"] * layer.ep_size))
        layer.dispatcher = DISPATCHERS.get("linear")().build(group, layer.router.num_experts)


def connect(
    engine: Any, dispatcher: DispatcherConfig | None = None, ranks_per_node: int | None = None
) -> list[DispatchMOELayer]:
    """Give the layers of ``engine`` their dispatchers and the engine an optimizer step that knows experts.

    Collective over the world; ranks whose part of the model has no MoE layer must call too.

    Args:
        engine: built over a converted model.
        dispatcher: options; absent: linear.
        ranks_per_node: see `ext.comm.topology.rank_groups`.

    Raises:
        ConfigError: on all ranks, where ``ranks_per_node`` does not fit, or no rank has an MoE layer.
    """
    layers = layers_of(engine)
    names = sorted({layer.ep_group_name for layer in layers})
    by_name = dict(
        zip(names, rank_groups([groups._get_expert_parallel_group(n) for n in names], ranks_per_node), strict=True)
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (len(layers), None if dispatcher is None else dispatcher.model_dump()))
    if not any(count for count, _ in everyone):
        raise ConfigError(
            "ext.moe: the model has no layer of deepspeed.moe.layer.MoE. Use one, or remove the 'moe' block."
        )
    if any(options != everyone[0][1] for _, options in everyone):
        each = "; ".join(f"rank {rank}: {options}" for rank, (_, options) in enumerate(everyone))
        raise ConfigError(f"ext.moe.dispatcher: differs between ranks: {each}. Give all ranks one config.")
    factory = DISPATCHERS.get("linear" if dispatcher is None else dispatcher.type)(dispatcher)
    built: dict[tuple[str, int], Dispatcher] = {}
    for layer in layers:
        key = (layer.ep_group_name, layer.router.num_experts)
        if key not in built:
            built[key] = factory.build(by_name[key[0]], key[1])
        layer.dispatcher = built[key]
        layer.loss_scale = lambda: _loss_scale(engine)
    _tell_other_groups(engine, layers)
    count_experts_once(engine)  # on stages without experts too, since all stages add up
    if engine.has_moe_layers:
        load_across_expert_sizes(engine)
        keep_biases(engine, layers)
    report_each_step(engine, layers)
    remember_under_checkpointing(engine.module)
    return layers


def _tell_other_groups(engine: Any, layers: Sequence[DispatchMOELayer]) -> None:
    """An error of one expert-parallel group ends the ranks of the others too. Collective over the world."""
    world_size = dist.get_world_size()
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, min((layer.ep_size for layer in layers), default=world_size))
    if min(everyone) == world_size:
        return  # all ranks see the same errors
    alarm, guard = Alarm.shared(), getattr(engine, "guard", None)
    if guard is not None:
        guard.alarm = alarm
    for layer in layers:
        layer.alarm, layer.agrees_after = alarm, guard is not None


def layers_of(engine: Any) -> list[DispatchMOELayer]:
    """The converted layers on this rank."""
    return _converted(engine.module)


def describe(engine: Any) -> str | None:
    """What the dispatchers of this rank's layers do, for `ext.describe`; None without a converted layer."""
    found = [layer.dispatcher for layer in layers_of(engine)]
    return "; ".join(dict.fromkeys(dispatcher.describe() for dispatcher in found if dispatcher is not None)) or None


def _converted(model: nn.Module) -> list[DispatchMOELayer]:
    return [module for module in model.modules() if isinstance(module, DispatchMOELayer)]


def _is_stock(layer: MOELayer) -> bool:
    return type(layer) is MOELayer and type(layer.gate) is TopKGate


def _moe_layers(model: nn.Module) -> list[tuple[str, MoE]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]


def _differing(everyone: list[tuple[list[str], int, str]]) -> list[str]:
    """A text where two ranks of one stage have different layers: their expert groups would never be created."""
    first_of: dict[int, tuple[int, str]] = {}
    for rank, (_, stage, layers) in enumerate(everyone):
        first, expected = first_of.setdefault(stage, (rank, layers))
        if layers != expected:
            return [
                f"ext.moe: the model differs between ranks: MoE layers on rank {first}: {expected}; on rank {rank}: "
                f"{layers}. Build the same layers on every rank."
            ]
    return []


def _problems(name: str, moe: MoE, num_stages: int) -> list[str]:
    """What cannot work about one layer."""
    found = []
    layer, gate = moe.deepspeed_moe, moe.deepspeed_moe.gate
    where = f"MoE layer {name}"
    if not isinstance(layer, DispatchMOELayer):
        if type(layer) is not MOELayer:
            found.append(
                f"{where}: its deepspeed_moe is a {type(layer).__name__}, whose forward ext.moe would replace. "
                "Use deepspeed.moe.layer.MoE as it is, or remove the 'moe' block."
            )
        elif layer.use_tutel:
            found.append(f"{where}: use_tutel and ext.moe both replace the dispatch. Remove one of them.")
        if type(gate) is not TopKGate:
            found.append(
                f"{where}: its gate is a {type(gate).__name__}, whose routing ext.moe would replace. Use "
                "deepspeed.moe.sharded_moe.TopKGate, or remove the 'moe' block."
            )
        elif problem := top_k_problem(gate.k, moe.num_experts):
            found.append(f"{where}: {problem}")
    if groups.mpu is not None and bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        found.append(f"{where}: ext.moe does not work with tensor parallelism yet. Remove the 'moe' block.")
    if problem := uneven_problem(moe.num_experts, moe.ep_size):
        return [*found, f"{where}: {problem}"]
    data_parallel = _world_size() // num_stages
    if data_parallel and data_parallel % moe.ep_size:
        legal = [n for n in range(1, data_parallel + 1) if data_parallel % n == 0 and moe.num_experts % n == 0]
        found.append(
            f"{where}: ep_size = {moe.ep_size} does not divide the {data_parallel} data-parallel ranks"
            f"{f' of each of the {num_stages} stages' if num_stages > 1 else ''} ({moe.num_experts} experts). "
            f"Use ep_size {', '.join(map(str, legal))}, or another number of ranks."
        )
    return found


def _loss_scale(engine: Any) -> float:
    """What the engine multiplies the loss of a micro-batch with before its backward."""
    scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    return scale / engine.gradient_accumulation_steps()


def _world_size() -> int:
    """0 where it is not known yet."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "0"))
