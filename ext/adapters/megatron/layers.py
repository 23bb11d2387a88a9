"""Dropped layers inside a TransformerBlock, and the random streams that their re-runs restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from ext.core.errors import ConfigError
from ext.recompute.regions import MicrobatchRegions


class MegatronRngTracker:
    """Captures and restores the streams of ``get_cuda_rng_tracker()``, which draw tensor-parallel dropout.

    The name of the stream in force belongs to them: with sequence parallelism the block runs inside one, whose entry
    in the table is out of date until it is left.
    """

    def capture(self) -> Any:
        tracker: Any = random.get_cuda_rng_tracker()
        return tracker.get_states(), getattr(tracker, _STREAM_IN_FORCE, None)

    def restore(self, state: Any) -> None:
        tracker: Any = random.get_cuda_rng_tracker()
        states, name = state
        tracker.set_states(dict(states))
        if name is not None:
            setattr(tracker, _STREAM_IN_FORCE, name)


_STREAM_IN_FORCE = "_current_state_name"


def transformer_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of the model's decoder on this rank.

    Raises:
        ConfigError: the model has no decoder with layers, so nothing can be counted or dropped.
    """
    try:
        decoder: Any = get_attr_wrapped_model(model, "decoder", allow_none=False)
        return list(decoder.layers)
    except (RuntimeError, AttributeError):
        raise ConfigError(
            f"ext: the model ({type(model).__name__}) has no 'decoder' with 'layers', as megatron.core's GPTModel and "
            "MambaModel have. Use such a model, or remove the pipeline and recompute settings."
        ) from None


@contextmanager
def forwards_replaced(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, these run where the layers are called; modules, hooks and names stay.

    It nests: under the all-reduce of a layer whose forward is replaced, an earlier micro-batch's unit may replace it.
    """
    before = [vars(layer).get("forward") for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


@contextmanager
def statistics_kept(layers: Sequence[nn.Module]) -> Iterator[None]:
    """What routers count and log inside is forgotten: a re-run counts nothing that its forward has not counted."""
    routers = [module for layer in layers for module in layer.modules() if isinstance(module, Router)]
    counts = [getattr(router, "local_tokens_per_expert", None) for router in routers]
    names = set(get_moe_layer_wise_logging_tracker())
    logged = [get_moe_layer_wise_logging_tracker()[name]["values"] for name in names] if routers else []
    tensors = [tensor for tensor in (*counts, *logged) if tensor is not None]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        for name in get_moe_layer_wise_logging_tracker().keys() - names if routers else ():
            get_moe_layer_wise_logging_tracker()[name]["values"].zero_()


def dropped(regions: MicrobatchRegions) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `forwards_replaced`: the layer's forward without keeping its activations.

    The hidden states are the region's input. Everything else that the block passes (masks, rotary embeddings,
    packed lengths) is shared by all layers and stays alive anyway.
    """

    def replace(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return regions.call(lambda hidden: forward(hidden, *args, **kwargs), hidden_states)

        return run

    return replace
