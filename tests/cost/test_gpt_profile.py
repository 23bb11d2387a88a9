"""Formulas for a GPT: bytes of a layer as published, parameters as counted."""

import pytest

from ext.cost.gpt import gpt_profile
from ext.cost.hardware import DEVICES
from ext.cost.profile import LayerProfile, parameters_of
from ext.cost.states import MIXED_ADAM, StateBytes
from ext.cost.transformer import TransformerShape

SHAPE = TransformerShape(hidden_size=1024, num_heads=16, num_layers=3, seq_length=512, vocab_size=50304)
S, B, H, A = 512, 2, 1024, 16


def _profile(**options):
    return gpt_profile(SHAPE, B, DEVICES["a100-80gb"], **options)


def _kept(layer: LayerProfile):
    return layer.bytes_of(layer.saved)


def test_bytes_of_a_layer():
    """Korthikanti et al. (arXiv:2205.05198), equations 1 and 2."""
    assert _kept(_profile()[1]) == 34 * S * B * H
    assert _kept(_profile(flash=False)[1]) == S * B * H * 34 + 5 * A * S * S * B
    for t in (2, 4):
        layer = _profile(flash=False, tensor_parallel=t)[1]
        assert _kept(layer) == S * B * H * (10 + 24 // t) + 5 * A * S * S * B // t
    assert _kept(_profile(dropout=False)[1]) == 32 * S * B * H


def test_the_head_keeps_its_inputs_and_log_probabilities():
    head = _profile()[-1]
    assert _kept(head) == 2 * 2 * S * B * H + 4 * S * B * 50304
    assert head.transient >= 4 * S * B * 50304


def test_layers_and_parameters():
    layers = _profile()
    assert [layer.name for layer in layers] == ["Embedding", *["TransformerLayer"] * 3, "Head"]
    block = 12 * H * H + 13 * H
    assert [layer.trained for layer in layers] == [50304 * H + S * H, block, block, block, 50304 * H + 2 * H]
    assert parameters_of(layers) == (50304 * H + S * H + 3 * block + 2 * H, 0)
    untied = _profile(tied=False)
    assert parameters_of(untied)[0] == sum(layer.trained for layer in untied)
    assert parameters_of(layers[-1:]) == (50304 * H + 2 * H, 0)
    halves = sum(layer.trained for layer in _profile(tensor_parallel=2)[1:4])
    assert halves == 3 * ((block - 6 * H) // 2 + 6 * H)


def test_a_backward_costs_two_forwards():
    block = _profile()[1]
    assert block.input_grad + block.weight_grad == pytest.approx(2 * block.forward)
    assert block.input_grad > block.weight_grad  # Attention's own products have no weights.


def test_state_bytes():
    states = MIXED_ADAM.of(1000, 10)
    assert (states.parameters, states.gradients, states.optimizer) == (2020, 4000, 12000)
    assert states.total == 18_020
    shared = StateBytes(parameter=2, gradient=2, optimizer=12, shards=4, bucket=77).of(1000)
    assert shared.optimizer == 3000
    assert shared.total == 2000 + 2000 + 3000 + 77
