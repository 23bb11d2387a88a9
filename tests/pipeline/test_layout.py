from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.core.errors import ConfigError
from ext.pipeline.costs import StageCosts
from ext.pipeline.layout import LayerCosts, stage_costs, uniform_layers


@given(num_stages=st.integers(1, 64), extra=st.integers(0, 300))
def test_uniform_layers_sum_to_all_layers_and_differ_by_one_at_most(num_stages, extra):
    layers = uniform_layers(num_stages + extra, num_stages)
    assert len(layers) == num_stages
    assert sum(layers) == num_stages + extra
    assert max(layers) - min(layers) <= 1
    assert list(layers) == sorted(layers, reverse=True)


def test_uneven_divisions():
    assert uniform_layers(30, 4) == (8, 8, 7, 7)
    assert uniform_layers(20, 8) == (3, 3, 3, 3, 2, 2, 2, 2)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="3 layers cannot fill 4 pipeline stages.*Use at most 3 stages"):
        uniform_layers(3, 4)


def test_stages_sum_their_layers_and_recompute_the_first():
    small = LayerCosts(1, 2, 3, 4, activations=5, stash=0.5)
    large = LayerCosts(10, 20, 30, 40, activations=50, stash=6)
    first, second = stage_costs([small, large, small, large], (3, 1), (2, 0), message=7)
    assert first == StageCosts(
        forward=12,
        input_grad=24,
        weight_grad=36,
        recompute=44,
        activations=60,
        dropped=55,
        stash=6.5,
        working_set=50,
        message=7,
    )
    assert second == StageCosts(10, 20, 30, activations=50, message=7)


def test_one_layer_stands_for_all():
    layer = LayerCosts(1, 2, 3, 4, 5, 0.5)
    assert stage_costs(layer, (2, 3), (1, 0)) == stage_costs([layer] * 5, (2, 3), (1, 0))


def test_costs_for_another_number_of_layers_are_refused():
    with pytest.raises(ConfigError, match="costs are given for 2 layers, the stages hold 3; give one per layer"):
        stage_costs([LayerCosts(1, 1, 1, 1, 1)] * 2, (2, 1), (0, 0))
    with pytest.raises(ConfigError, match="recomputed_layers lists 3 stages, layers_per_stage 2"):
        stage_costs(LayerCosts(1, 1, 1, 1, 1), (2, 1), (0, 0, 0))
