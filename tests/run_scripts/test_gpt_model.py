"""The example GPT: shapes, causality, loss at initialisation, the same weights for every number of stages."""

import dataclasses
import math

import deepspeed
import pytest
import torch

from ext.recompute.units import run_units, units_of
from ext.testing.ranks import run_ranks
from gpt import model

CONFIG = model.GPTConfig(vocab_size=61, num_layers=3, hidden_size=32, num_heads=4, sequence_length=16)
SAMPLE = (torch.zeros(1, 16, dtype=torch.int64),) * 2


def _logits(layers, tokens):
    hidden = tokens
    for layer in layers:
        hidden = layer(hidden)
    return hidden


def _built(config):
    torch.manual_seed(0)
    modules, tied = [], {}
    for spec in model.layers(config):
        key = getattr(spec, "key", None)
        if key is None:
            modules.append(spec.build())
        elif key not in tied:
            tied[key] = spec.build()
            modules.append(tied[key])
        else:
            modules.append(lambda hidden, spec=spec, shared=tied[key]: spec.forward_fn(shared, hidden))
    return modules


def test_loss_at_initialisation_is_that_of_a_guess():
    tokens = torch.randint(CONFIG.vocab_size, (8, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CONFIG.vocab_size, (8, 16), generator=torch.Generator().manual_seed(2))
    logits = _logits(_built(CONFIG), tokens)
    assert logits.shape == (8, 16, CONFIG.vocab_size)
    assert model.loss_fn(logits, labels).item() == pytest.approx(math.log(CONFIG.vocab_size), abs=0.05)


def test_a_token_sees_only_what_stands_before_it():
    layers = _built(CONFIG)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    changed = tokens.clone()
    changed[0, 9] = 5
    before, after = _logits(layers, tokens)[0], _logits(layers, changed)[0]
    assert torch.equal(before[:9], after[:9])
    assert not torch.allclose(before[10:], after[10:])


def test_units_are_the_forward_bit_for_bit():
    layer = model.TransformerLayer(dataclasses.replace(CONFIG, dropout=0.2))
    results = []
    for run in (layer, lambda x: run_units(units_of(layer), (x,))):
        torch.manual_seed(3)
        x = torch.randn(2, 16, 32).requires_grad_()
        layer.zero_grad()
        output = run(x)
        output.square().sum().backward()
        results.append([output, x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert [unit.name for unit in units_of(layer).units if unit.keep] == []


def test_loss_is_computed_in_fp32():
    logits = torch.randn(2, 4, 61).bfloat16()
    assert model.loss_fn(logits, torch.zeros(2, 4, dtype=torch.int64)).dtype == torch.float32


def _weights_by_layer(rank, world_size):
    """Sums of the parameters of every layer this rank has, for one and for two stages."""
    deepspeed.init_distributed()
    sums = []
    for num_stages in (1, 2):
        module = model.build(CONFIG, num_stages, 7, {}, SAMPLE)
        sums.append(
            {
                index + module._local_start: [p.double().abs().sum().item() for p in layer.parameters()]
                for index, layer in enumerate(module.forward_funcs)
                if hasattr(layer, "parameters")
            }
        )
        tied = module.tied_modules["embedding"].weight.double().abs().sum().item()
        sums[-1]["tied"] = tied
    return sums


@pytest.mark.dist
def test_every_number_of_stages_builds_the_same_weights():
    first, second = run_ranks(_weights_by_layer, 2)
    whole, stages = first[0], (first[1], second[1])
    assert stages[0]["tied"] == stages[1]["tied"] == whole["tied"]
    blocks = [index for stage in stages for index in stage if index != "tied"]
    assert sorted(blocks) == sorted(index for index in whole if index != "tied")
    for stage in stages:
        for index, sums in stage.items():
            assert sums == whole[index], index


def test_experts_do_not_depend_on_the_ranks_that_share_them(monkeypatch):
    experts = {}
    for ranks in (1, 2):
        config = dataclasses.replace(CONFIG, num_experts=4, expert_parallel=ranks)
        for rank in range(ranks):
            monkeypatch.setattr(model.dist, "get_rank", lambda rank=rank: rank)
            torch.manual_seed(3)
            layer = model.ExpertMlp(config, 4)
            for local, expert in enumerate(layer.moe.deepspeed_moe.experts.deepspeed_experts):
                experts[ranks, rank * layer.moe.num_local_experts + local] = expert.state_dict()
    for index in range(4):
        for name, value in experts[1, index].items():
            assert torch.equal(experts[2, index][name], value)
    assert not torch.equal(experts[1, 0]["0.weight"], experts[1, 1]["0.weight"])
    monkeypatch.undo()
    tokens = torch.randint(CONFIG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    logits = _logits(_built(dataclasses.replace(CONFIG, num_experts=4)), tokens)
    assert logits.shape == (2, 16, CONFIG.vocab_size)
