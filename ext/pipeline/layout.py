"""Layers on stages: how many each stage holds, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ext.core.errors import ConfigError
from ext.pipeline.costs import StageCosts


@dataclass(frozen=True)
class LayerCosts:
    """Times and sizes of one layer for one micro-batch, in any one unit of time and of memory.

    Attributes:
        forward: time of the forward.
        input_grad: time of the gradient of the inputs.
        weight_grad: time of the gradient of the weights.
        recompute: time to re-run the forward.
        activations: all that the layer keeps for its backward.
        stash: what stays in its place where the layer is recomputed (its input).
    """

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    activations: float
    stash: float = 0.0


def stage_costs(
    layers: LayerCosts | Sequence[LayerCosts],
    layers_per_stage: Sequence[int],
    recomputed_layers: Sequence[int],
    *,
    message: float = 0.0,
) -> tuple[StageCosts, ...]:
    """Costs of every stage. A stage recomputes its first layers.

    Args:
        layers: of every layer in model order, or one for all.
        layers_per_stage: layers of each stage, by stage.
        recomputed_layers: how many of these are recomputed, by stage.
        message: size of the activations between two stages, in the unit of the link's bandwidth.

    Raises:
        ConfigError: lists of different length, or costs for another number of layers.
    """
    if len(layers_per_stage) != len(recomputed_layers):
        raise ConfigError(
            f"recomputed_layers lists {len(recomputed_layers)} stages, layers_per_stage {len(layers_per_stage)}; "
            f"give one number per stage in both."
        )
    if isinstance(layers, LayerCosts):
        return tuple(
            _equal_layers(layers, count, again, message)
            for count, again in zip(layers_per_stage, recomputed_layers, strict=True)
        )
    if len(layers) != sum(layers_per_stage):
        raise ConfigError(
            f"costs are given for {len(layers)} layers, the stages hold {sum(layers_per_stage)}; give one per layer."
        )
    stages = []
    first = 0
    for count, again in zip(layers_per_stage, recomputed_layers, strict=True):
        stages.append(_listed_layers(layers[first : first + count], again, message))
        first += count
    return tuple(stages)


def _equal_layers(layer: LayerCosts, count: int, again: int, message: float) -> StageCosts:
    return StageCosts(
        forward=count * layer.forward,
        input_grad=count * layer.input_grad,
        weight_grad=count * layer.weight_grad,
        recompute=again * layer.recompute,
        activations=count * layer.activations,
        dropped=again * layer.activations,
        stash=again * layer.stash,
        working_set=layer.activations if again else 0.0,
        message=message,
    )


def _listed_layers(held: Sequence[LayerCosts], again: int, message: float) -> StageCosts:
    dropped = held[:again]
    return StageCosts(
        forward=sum(layer.forward for layer in held),
        input_grad=sum(layer.input_grad for layer in held),
        weight_grad=sum(layer.weight_grad for layer in held),
        recompute=sum(layer.recompute for layer in dropped),
        activations=sum(layer.activations for layer in held),
        dropped=sum(layer.activations for layer in dropped),
        stash=sum(layer.stash for layer in dropped),
        working_set=max((layer.activations for layer in dropped), default=0.0),
        message=message,
    )


def uniform_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage that differ by one at most and sum to ``num_layers``; the first stages get the remainder.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages; every stage needs at least one. "
            f"Use at most {num_layers} stages or at least {num_stages} layers."
        )
    share, rest = divmod(num_layers, num_stages)
    return tuple(share + (stage < rest) for stage in range(num_stages))
