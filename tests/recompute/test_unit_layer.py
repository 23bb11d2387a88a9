"""The transformer layer of tests and benchmarks, against attention as PyTorch has it."""

import pytest
import torch
from torch.nn import functional

from ext.testing.unit_layer import UnitLayer


@pytest.mark.parametrize("batch", [1, 2])
def test_unfused_attention_is_pytorchs(batch):
    torch.manual_seed(0)
    qkv = torch.randn(batch, 6, 3 * 8, dtype=torch.float64, requires_grad=True)
    whole, unfused = (UnitLayer(8, 2, flash=flash, dtype=torch.float64) for flash in (True, False))
    outputs = []
    for layer in (whole, unfused):
        values = {"qkv": qkv}
        for unit in layer.units().units:
            if unit.name in ("scores", "probs", "dropped", "attention"):
                values[unit.name] = unit.fn(*(values[name] for name in unit.inputs))
        (gradient,) = torch.autograd.grad(values["attention"].sin().sum(), qkv)
        outputs.append((values["attention"], gradient))
    for got, want in zip(*reversed(outputs), strict=True):
        torch.testing.assert_close(got, want)


def test_masks_of_one_byte_drop_and_scale_what_they_keep():
    layer = UnitLayer(8, 2, dropout=0.25, byte_masks=True, dtype=torch.float64)
    values = {"qkv": torch.randn(1, 6, 3 * 8, dtype=torch.float64)}
    for unit in layer.units().units:
        if unit.name in ("scores", "probs", "mask", "dropped", "attention"):
            values[unit.name] = unit.fn(*(values[name] for name in unit.inputs))
    mask = values["mask"]
    assert mask.element_size() == 1
    assert 0 < mask.sum() < mask.numel()
    value = layer._heads_of(values["qkv"])[2]
    want = (values["probs"] * mask / 0.75 @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(values["attention"], want)


def test_masks_of_one_byte_change_nothing_in_evaluation():
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    plain, masked = (UnitLayer(8, 2, dropout=0.25, byte_masks=masks).eval() for masks in (False, True))
    torch.testing.assert_close(masked(x), plain(x))


def test_scores_see_no_later_position():
    layer = UnitLayer(8, 2)
    scores = layer._scores(torch.randn(2, 5, 3 * 8))
    assert torch.equal(scores.isinf(), torch.ones(5, 5, dtype=torch.bool).triu(1).expand(2, 2, 5, 5))
    assert functional.softmax(scores, -1)[..., 0, 0].eq(1).all()
