"""Layers that are not built yet: their parameters, and what they cost when built one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ext.adapters.deepspeed.moe import isolate
from ext.core.errors import ConfigError
from ext.cost.profile import LOSS, LayerProfile
from ext.runtime.profile import ProfiledLayer


def count_parameters(specs: Sequence[Any]) -> int | None:
    """Parameters of one stage with these layers, shared ones once, without memory for them.

    None where a layer cannot be made without memory.
    """
    numbers: dict[Hashable, int] = {}
    for spec in specs:
        if isinstance(spec, nn.Module):
            numbers |= {id(parameter): parameter.numel() for parameter in spec.parameters()}
        elif isinstance(spec, LayerSpec):
            number = _number_of_parameters(spec)
            if number is None:
                return None
            numbers[spec.key if isinstance(spec, TiedLayerSpec) else (id(spec), len(numbers))] = number
    return sum(numbers.values())


def profile_specs(
    specs: Sequence[Any],
    recomputable: Sequence[bool],
    loss_fn: Callable[[Any, Any], Any] | None,
    sample_batch: tuple[Any, Any],
    dtype: torch.dtype,
) -> tuple[list[LayerProfile], LayerProfile | None]:
    """Build every layer once, run one micro-batch through it on this rank's device, and let it go again.

    At no time is there more than one layer; equal ones are built and measured once. Random streams are put back.

    Args:
        specs: of the whole model.
        recomputable: which of them can be recomputed.
        loss_fn: of the last output and the labels.
        sample_batch: inputs and labels of one micro-batch.
        dtype: of the parameters in training.

    Returns:
        The profiles of the layers and of the loss.
    """
    device: Any = get_accelerator()
    place = device.current_device_name()
    inputs, labels = (_moved(part, place) for part in sample_batch)
    profiles: list[LayerProfile] = []
    known: dict[Hashable, tuple[LayerProfile, Any]] = {}
    with _random_streams_kept(), torch.no_grad():
        for spec, may in zip(specs, recomputable, strict=True):
            # Only equal layers on equal inputs cost the same.
            key = (_key(spec), _shapes(inputs))
            if key not in known:
                layer = _build(spec, place, dtype)
                probe = ProfiledLayer(
                    layer,
                    _name(spec),
                    recomputable=may,
                    tied=_tied(spec, layer),
                    synchronize=device.synchronize,
                )
                outputs = probe(inputs)
                assert probe.profile is not None
                known[key] = probe.profile, outputs
            profile, inputs = known[key]
            profiles.append(profile)
        if loss_fn is None:
            return profiles, None
        loss = ProfiledLayer(
            lambda outputs: loss_fn(outputs, labels), LOSS, recomputable=False, synchronize=device.synchronize
        )
        loss(inputs)
        return profiles, loss.profile


def _number_of_parameters(spec: LayerSpec) -> int | None:
    try:
        with torch.device("meta"):
            layer = spec.build()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        # A constructor may do what has no meaning without memory, such as drawing from a generator of its own.
        return None
    return sum(parameter.numel() for parameter in layer.parameters())


def _build(spec: Any, device: str, dtype: torch.dtype) -> Any:
    """What the module's forward would call, with parameters as in training; the original is left alone."""
    if isinstance(spec, nn.Module):
        layer = copy.deepcopy(spec).to(device, dtype).train()
        isolate(layer)
        return layer
    if not isinstance(spec, LayerSpec):
        return spec
    try:
        layer = spec.build().to(device, dtype).train()
    except AssertionError as error:  # how the host refuses arguments, such as experts that ranks cannot share
        raise ConfigError(f"the layer {_name(spec)} cannot be built: {error}") from error
    isolate(layer)
    forward_fn = getattr(spec, "forward_fn", None)
    return layer if forward_fn is None else partial(forward_fn, layer)


def _tied(spec: Any, layer: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(spec, TiedLayerSpec):
        return ()
    module = layer.args[0] if isinstance(layer, partial) else layer
    return ((spec.key, sum(p.numel() for p in module.parameters() if p.requires_grad)),)


def _key(spec: Any) -> Hashable:
    """Equal for layers that are made alike."""
    if isinstance(spec, LayerSpec):
        key = spec.typename, spec.module_args, tuple(sorted(spec.module_kwargs.items()))
        try:
            hash(key)
        except TypeError:
            return id(spec)
        return (*key, getattr(spec, "forward_fn", None))
    return id(spec)


def _name(spec: Any) -> str:
    return spec.typename.__name__ if isinstance(spec, LayerSpec) else type(spec).__name__


def _moved(values: Any, device: str) -> Any:
    if isinstance(values, Tensor):
        return values.to(device)
    return type(values)(_moved(value, device) for value in values) if isinstance(values, tuple | list) else values


def _shapes(values: Any) -> tuple[Any, ...]:
    tensors = values if isinstance(values, tuple | list) else (values,)
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors if isinstance(t, Tensor))


@contextmanager
def _random_streams_kept() -> Iterator[None]:
    device: Any = get_accelerator()
    states = torch.get_rng_state(), device.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        device.set_rng_state(states[1])
