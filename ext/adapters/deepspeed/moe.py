"""Turning the MoE layers of a model into ours before `deepspeed.initialize`, and connecting them after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from ext.adapters.deepspeed.moe_checkpoint import load_across_expert_sizes
from ext.adapters.deepspeed.moe_gate import check_top_k
from ext.adapters.deepspeed.moe_layer import DispatchMoE, DispatchMOELayer
from ext.adapters.deepspeed.moe_monitor import report_each_step
from ext.adapters.deepspeed.moe_norm import count_experts_once
from ext.comm.topology import rank_groups
from ext.core.errors import ConfigError
from ext.moe.dispatcher import DISPATCHERS, DispatcherConfig
from ext.moe.dispatchers.base import Dispatcher
from ext.moe.router import RouterConfig


def convert(model: nn.Module, router: RouterConfig | None = None, num_stages: int = 1) -> list[DispatchMOELayer]:
    """Replace the inside of every DeepSpeed MoE layer of ``model``; parameters and their names stay.

    Without communication; to be called before the engine is built, on every rank.

    Args:
        model: any module, also a PipelineModule (this rank's layers).
        router: options for all routers; absent: as DeepSpeed has them.
        num_stages: pipeline stages, to know the data-parallel size.

    Raises:
        ConfigError: everything that cannot work, by layer.
    """
    config = RouterConfig() if router is None else router
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]
    problems = [problem for name, moe in found for problem in _problems(name, moe, num_stages)]
    if problems:
        raise ConfigError(*problems)
    layers = []
    for name, moe in found:
        if not isinstance(moe.deepspeed_moe, DispatchMOELayer):
            moe.deepspeed_moe = DispatchMOELayer(moe.deepspeed_moe, name, config)
            if type(moe) is MoE:
                # The object stays, since the model and a pipeline's list of layers may hold it elsewhere too.
                moe.__class__ = DispatchMoE
        layers.append(moe.deepspeed_moe)
    return layers


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
        ConfigError: on all ranks, where ``ranks_per_node`` does not fit.
    """
    layers = [module for module in engine.module.modules() if isinstance(module, DispatchMOELayer)]
    names = sorted({layer.ep_group_name for layer in layers})
    by_name = dict(
        zip(names, rank_groups([groups._get_expert_parallel_group(n) for n in names], ranks_per_node), strict=True)
    )
    factory = DISPATCHERS.get("linear" if dispatcher is None else dispatcher.type)(dispatcher)
    built: dict[tuple[str, int], Dispatcher] = {}
    for layer in layers:
        key = (layer.ep_group_name, layer.router.num_experts)
        if key not in built:
            built[key] = factory.build(by_name[key[0]], key[1])
        layer.dispatcher = built[key]
        layer.loss_scale = lambda: float(engine.loss_scale()) / engine.gradient_accumulation_steps()
    if engine.has_moe_layers:
        count_experts_once(engine)
        load_across_expert_sizes(engine)
    report_each_step(engine, layers)
    return layers


def describe(layers: Sequence[DispatchMOELayer]) -> str | None:
    """What the dispatchers of these layers do, for `ext.describe`; None without layers."""
    texts = dict.fromkeys(layer.dispatcher.describe() for layer in layers if layer.dispatcher is not None)
    return "; ".join(texts) or None


def _problems(name: str, moe: MoE, num_stages: int) -> list[str]:
    """What cannot work about one layer."""
    problems = []
    layer, gate = moe.deepspeed_moe, moe.deepspeed_moe.gate
    where = f"MoE layer {name}"
    if not isinstance(layer, DispatchMOELayer):
        if type(layer) is not MOELayer:
            problems.append(
                f"{where}: its deepspeed_moe is a {type(layer).__name__}, whose forward ext.moe would replace. "
                "Use deepspeed.moe.layer.MoE as it is, or remove the 'moe' block."
            )
        elif layer.use_tutel:
            problems.append(f"{where}: use_tutel and ext.moe both replace the dispatch. Remove one of them.")
        if type(gate) is not TopKGate:
            problems.append(
                f"{where}: its gate is a {type(gate).__name__}, whose routing ext.moe would replace. Use "
                "deepspeed.moe.sharded_moe.TopKGate, or remove the 'moe' block."
            )
        else:
            try:
                check_top_k(gate.k, moe.num_experts, name)
            except ConfigError as error:
                problems += error.problems
    if groups.mpu is not None and bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        problems.append(f"{where}: ext.moe does not work with tensor parallelism yet. Remove the 'moe' block.")
    data_parallel = _world_size() // num_stages
    if data_parallel and data_parallel % moe.ep_size:
        legal = [n for n in range(1, data_parallel + 1) if data_parallel % n == 0 and moe.num_experts % n == 0]
        problems.append(
            f"{where}: ep_size = {moe.ep_size} does not divide the {data_parallel} data-parallel ranks"
            f"{f' of each of the {num_stages} stages' if num_stages > 1 else ''} ({moe.num_experts} experts). "
            f"Use ep_size {', '.join(map(str, legal))}, or another number of ranks."
        )
    return problems


def _world_size() -> int:
    """0 where it is not known yet."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "0"))
