"""The emulated machine under budgets of activations, for the search and the simulator."""

from __future__ import annotations

from ext.pipeline.layout import LayerCosts
from ext.planner.search.space import Space, any_layers
from pipeline_bench.setting import Setting

STASH = 0.06
"""What a recomputed layer keeps, as a share of its activations."""


def layer_costs(setting: Setting, stash: float = STASH) -> LayerCosts:
    """One layer; activations in A, all of one rank's share of the model for one micro-batch."""
    share = 1 / setting.layers_per_rank
    return LayerCosts(
        forward=setting.forward * share,
        input_grad=setting.input_grad * share,
        weight_grad=setting.weight_grad * share,
        recompute=setting.recompute * share,
        activations=share,
        stash=stash * share,
    )


def space(setting: Setting, budget: float, *, moves_layers: bool = True) -> Space:
    """What a search may choose where every rank may hold ``budget``, in A."""
    layers = (setting.layers_per_rank,) * setting.num_ranks
    budgets = (budget,) * setting.num_ranks
    return Space(any_layers(layer_costs(setting)), layers, setting.num_microbatches, budgets, moves_layers=moves_layers)
