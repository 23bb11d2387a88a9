"""The routers' loads in DeepSpeed's monitor, and the bias that evens them out, after every optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils.bwc import bwc_pipeline_parallel_group, bwc_pipeline_parallel_world_size

from ext.adapters.deepspeed.moe_layer import DispatchMOELayer
from ext.moe.statistics import Load, take_loads, update_bias

Events = list[tuple[str, float, int]]
_BIASES = "ext_moe_biases"


def report_each_step(engine: Any, layers: Sequence[DispatchMOELayer]) -> None:
    """Hook the engine's optimizer, where the monitor is on or a bias is used; the same on every rank."""
    has_bias = any(layer.router.bias is not None for layer in layers)
    if not (has_bias or engine.monitor.enabled) or engine.optimizer is None:
        return
    host_step = engine._take_model_step

    def take_model_step(*args: Any, **kwargs: Any) -> None:
        host_step(*args, **kwargs)
        _after_step(engine, layers)

    engine._take_model_step = take_model_step


def keep_biases(engine: Any, layers: Sequence[DispatchMOELayer]) -> None:
    """Save the balancing biases in the client state, which DeepSpeed carries in its own files, and load them."""
    biases = {layer.name: layer.router.bias for layer in layers if layer.router.bias is not None}
    if not biases:
        return
    host_save, host_load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: str, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        state = {**(client_state or {}), _BIASES: {name: bias.tolist() for name, bias in biases.items()}}
        return host_save(save_dir, tag, state, *args, **kwargs)

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        path, client_state = host_load(*args, **kwargs)
        saved = (client_state or {}).pop(_BIASES, {})
        for name, bias in biases.items():
            if name in saved:
                bias.copy_(torch.tensor(saved[name]))
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def events_of(name: str, load: Load, samples: int) -> Events:
    """One router's events, by DeepSpeed's convention (name, value, samples)."""
    prefix = f"Train/MoE/{name}"
    per_expert = [(f"{prefix}/load/expert_{i}", float(count), samples) for i, count in enumerate(load.counts)]
    return [
        (f"{prefix}/dropped_share", load.dropped_share, samples),
        (f"{prefix}/load_max_over_mean", load.max_over_mean, samples),
        *per_expert,
    ]


def _after_step(engine: Any, layers: Sequence[DispatchMOELayer]) -> None:
    """Collective over this stage's replicas, and for the monitor over the stages of the first one."""
    events: Events = []
    if layers:
        routers = [layer.router for layer in layers]
        loads = take_loads([router.statistics for router in routers], engine.data_parallel_group, engine.device)
        for layer, router, load in zip(layers, routers, loads, strict=True):
            if router.bias is not None:
                update_bias(router.bias, load, router.config.bias_rate)
            events += events_of(layer.name, load, engine.global_samples)
    if engine.monitor.enabled:
        engine.monitor.write_events(_from_all_stages(engine, events))


def _from_all_stages(engine: Any, events: Events) -> Events:
    """All events on global rank 0, the only one that writes."""
    mpu = engine.mpu
    if mpu is None or bwc_pipeline_parallel_world_size(mpu) == 1 or mpu.get_data_parallel_rank() != 0:
        return events
    group = bwc_pipeline_parallel_group(mpu)
    gathered: list[Events] | None = None
    if dist.get_rank() == 0:
        gathered = [[] for _ in range(dist.get_world_size(group))]
    dist.gather_object(events, gathered, dst=0, group=group)
    return [event for stage in gathered or [] for event in stage]
