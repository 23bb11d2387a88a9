import pytest
from pydantic import ValidationError

from ext.core.errors import ConfigError
from ext.cost.transformer import MODELS, TransformerShape, model_preset


def test_parameters_of_a_layer_counted_by_hand():
    shape = TransformerShape(hidden_size=4, num_heads=2, num_layers=3, seq_length=8, vocab_size=10)
    qkv, projection, fc1, fc2 = 4 * 12 + 12, 4 * 4 + 4, 4 * 16 + 16, 16 * 4 + 4
    assert shape.layer_parameters == qkv + projection + fc1 + fc2 + 2 * 8
    assert shape.embedding_parameters == 10 * 4 + 8 * 4


def test_operations_of_a_layer_counted_by_hand():
    shape = TransformerShape(hidden_size=4, num_heads=2, num_layers=3, seq_length=8, vocab_size=10)
    products = 2 * 8 * (4 * 12 + 4 * 4 + 4 * 16 + 16 * 4)
    attention = 2 * (2 * 8 * 8 * 4)
    assert shape.layer_flops(3) == 3 * (products + attention)
    assert shape.head_flops(3) == 3 * 2 * 8 * 4 * 10
    assert shape.boundary_bytes(3) == 3 * 8 * 4 * 2


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-1.3b", 1.3), ("gpt-7b", 6.7), ("gpt-13b", 12.9), ("gpt-20b", 20.3)]
)
def test_presets_have_the_size_of_their_name(name, billions):
    shape = MODELS[name]
    total = shape.num_layers * shape.layer_parameters + shape.embedding_parameters
    assert total / 1e9 == pytest.approx(billions, rel=0.03)


def test_wrong_shapes_and_names_are_refused():
    with pytest.raises(ValidationError, match="no multiple of num_heads"):
        TransformerShape(hidden_size=10, num_heads=3, num_layers=1, seq_length=1)
    with pytest.raises(ConfigError, match="Did you mean 'gpt-13b'"):
        model_preset("gpt-13")
