"""A profile of every stage of a DeepSpeed pipeline, from one micro-batch that is not consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from ext.adapters.deepspeed.layers import LayerInventory, layers_replaced
from ext.adapters.deepspeed.rng import DeepSpeedRngTracker
from ext.cost.profile import LOSS, LayerProfile
from ext.recompute.units import LayerCosts
from ext.runtime.messages import as_tuple
from ext.runtime.profile import ProfiledLayer, shared_profiles


@dataclass(frozen=True)
class Profiles:
    """What was measured.

    Attributes:
        layers: by stage; the loss is the last layer of the last stage.
        units: by stage, costs of the units of its layers, None for those that cannot be recomputed; None where nobody
            asked.
    """

    layers: list[tuple[LayerProfile, ...]]
    units: list[tuple[LayerCosts | None, ...]] | None = None


def profile_stages(engine: Any, *, with_units: bool = False, with_deferral: bool = False) -> Profiles:
    """Profile the layers of every stage on the next micro-batch of the engine's iterator.

    Each stage measures its layers while the host's forward runs through them, one stage after another; nothing is
    trained and no state of the model or of a random stream changes. Collective over the world; every rank gets what
    the pipeline of global rank 0 measured.

    Args:
        engine: of this rank.
        with_units: whether the units of layers are measured, too.
        with_deferral: whether it is measured, too, what waits for W where the backward is split.
    """
    layers = _profiled_layers(engine, with_units=with_units, with_deferral=with_deferral)
    if engine.is_last_stage() and engine.module.loss_fn is not None:
        layers.append(_profiled_loss(engine, with_deferral=with_deferral))
    with _untouched(engine), torch.no_grad(), layers_replaced(engine.module, layers):
        engine._exec_schedule(engine._inference_schedule(1))
    group = engine.grid.get_pipe_parallel_group()
    mine = tuple(layer.profile for layer in layers if layer.profile is not None)
    profiles = shared_profiles(mine, engine.stage_id, group)
    if not with_units:
        return Profiles(profiles)
    units = tuple(layer.unit_costs for layer in layers[: len(engine.module.forward_funcs)])
    return Profiles(profiles, shared_profiles(units, engine.stage_id, group))


def tied_parameters(module: PipelineModule) -> list[tuple[tuple[str, int], ...]]:
    """For every layer of this stage, name and number of the trained parameters that a tied layer shares."""
    specs = module._layer_specs[module._local_start : module._local_stop]
    return [
        ((spec.key, count_trained(module.tied_modules[spec.key])),) if isinstance(spec, TiedLayerSpec) else ()
        for spec in specs
    ]


def count_trained(module: nn.Module) -> int:
    """Trained parameters of a module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _profiled_layers(engine: Any, **measured: Any) -> list[ProfiledLayer]:
    module = engine.module
    inventory = LayerInventory.of(module)
    first = module._local_start
    layers = [
        ProfiledLayer(
            layer,
            inventory.names[first + position],
            recomputable=inventory.recomputable[first + position],
            tied=tied,
            synchronize=_device().synchronize,
            **measured,
        )
        for position, (layer, tied) in enumerate(zip(module.forward_funcs, tied_parameters(module), strict=True))
    ]
    # The host copies the inputs, and without gradients a copy does not say whether the original needs one.
    layers[0].needs_grad = partial(_inputs_need_grad, engine)
    return layers


def _profiled_loss(engine: Any, **measured: Any) -> ProfiledLayer:
    """The loss as one more layer; the labels that it keeps for its backward count with it."""
    loss = partial(_loss_of, engine.module.loss_fn, lambda: engine.pipe_buffers["labels"][0])
    return ProfiledLayer(loss, LOSS, recomputable=False, synchronize=_device().synchronize, **measured)


def _loss_of(loss_fn: Any, labels: Callable[[], Any], outputs: Any) -> Any:
    return loss_fn(outputs, labels())


def _inputs_need_grad(engine: Any) -> list[bool]:
    return [tensor.requires_grad for tensor in as_tuple(engine.pipe_buffers["inputs"][0])]


@contextmanager
def _untouched(engine: Any) -> Iterator[None]:
    """Put back what a forward changes: random streams, buffers of layers, counters of the host."""
    module, device, tracker = engine.module, _device(), DeepSpeedRngTracker()
    random = torch.get_rng_state(), device.get_rng_state(), tracker.capture()
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    kept = module.training, module.micro_offset, module.activation_checkpoint_interval, engine.total_loss
    module.train()
    module.activation_checkpoint_interval = 0
    engine._compute_loss = False
    try:
        yield
    finally:
        training, module.micro_offset, module.activation_checkpoint_interval, engine.total_loss = kept
        module.train(training)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(random[0])
        device.set_rng_state(random[1])
        tracker.restore(random[2])


def _device() -> Any:
    return get_accelerator()
