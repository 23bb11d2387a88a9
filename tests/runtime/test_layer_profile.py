"""Profiles of real layers predict, to the byte, what micro-batches in flight hold on a stage."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ext.cost.gpt import gpt_profile
from ext.cost.hardware import DEVICES
from ext.cost.profile import Deferral
from ext.cost.transformer import TransformerShape
from ext.pipeline.actions import Action, B, F, I, R, W
from ext.pipeline.memory import heaviest_loads, peak
from ext.pipeline.stage_model import Stage
from ext.recompute.regions import DroppedLayer, MicrobatchRegions
from ext.runtime.live_bytes import LiveBytes
from ext.runtime.profile import ProfiledLayer
from ext.runtime.split_backward import WeightGradQueue
from ext.testing.tiny_gpt import HIDDEN, SEQ, VOCAB, TinyBlock, TinyHead

BATCH = 6


class Residual(nn.Module):
    """Keeps its input, as a norm does."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, factor * width),
            nn.Linear(factor * width, width),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Masked(nn.Module):
    """Tensors as a tuple; the mask goes through unchanged and is saved on the way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs):
        x, mask = inputs
        return torch.tanh(self.linear(x)) * mask, mask


def _stacks():
    torch.manual_seed(0)
    return {
        "residual": [Residual(16, 4), Residual(16, 2), Residual(16, 8), Residual(16, 4)],
        "saves_its_output": [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, 8)],
        "embedding_first": [nn.Embedding(11, 16), Residual(16, 4), nn.Dropout(0.5), nn.Linear(16, 11)],
        "tuples": [Masked(16), Masked(16), Masked(16)],
        "same_storage": [nn.Flatten(), nn.Identity(), nn.Linear(16, 16), nn.Unflatten(1, (4, 4))],
    }


def _input(name, index):
    generator = torch.Generator().manual_seed(index)
    if name == "embedding_first":
        return torch.randint(0, 11, (BATCH, 5), generator=generator)
    x = torch.randn(BATCH, 16, generator=generator)
    if name == "tuples":
        return x, torch.randint(0, 2, (BATCH, 1), generator=generator).float()
    return x.view(BATCH, 4, 4) if name == "same_storage" else x


def _profiles(name, layers):
    x = _input(name, 0)
    profiled = [ProfiledLayer(layer, type(layer).__name__, recomputable=True, with_deferral=True) for layer in layers]
    with torch.no_grad():
        for layer in profiled:
            x = layer(x)
    return [layer.profile for layer in profiled]


def _measured(name, layers, dropped, order):
    """The most that autograd and the pipeline's buffers hold while one rank runs the order."""
    constant = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    held = {}
    counter = LiveBytes(constant, held=lambda: [t for tensors in held.values() for t in tensors])
    outputs, regions = {}, {}
    splits = {microbatch for kind, microbatch in order if kind is I}
    queue = WeightGradQueue(len(splits), counter.note)
    for kind, microbatch in order:
        if kind is F:
            given = _input(name, microbatch)
            x = tuple(t.clone() for t in given) if isinstance(given, tuple) else given.clone()
            held["in", microbatch] = list(given) if isinstance(given, tuple) else [given]
            del given
            regions[microbatch] = MicrobatchRegions(around_reruns=counter.reruns)
            with counter.saved():
                for index, layer in enumerate(layers):
                    layer = queue.intercepting(layer) if microbatch in splits else layer
                    x = (DroppedLayer(layer, regions[microbatch]) if index in dropped else layer)(x)
            outputs[microbatch] = x
            held["out", microbatch] = list(x) if isinstance(x, tuple) else [x]
            del x
            counter.sample()
        elif kind is R:
            regions[microbatch].recompute()
        elif kind is W:
            queue.release(0, microbatch)
        else:
            x = outputs.pop(microbatch)
            splitting = queue.deferring(0, microbatch) if kind is I else nullcontext()
            with splitting, regions.pop(microbatch).backward():
                root = x[0] if isinstance(x, tuple) else x
                root.backward(torch.ones_like(root))  # as large as the gradient that another stage sends
                del root
            del x, held["in", microbatch], held["out", microbatch]
    return counter.peak


ORDERS = {
    "one": [(F, 0), (B, 0)],
    "one_early": [(F, 0), (R, 0), (B, 0)],
    "three_in_flight": [(F, 0), (F, 1), (F, 2), (B, 0), (B, 1), (B, 2)],
    "split": [(F, 0), (I, 0), (W, 0)],
    "split_early": [(F, 0), (R, 0), (I, 0), (W, 0)],
    "split_in_flight": [(F, 0), (F, 1), (I, 0), (F, 2), (I, 1), (W, 0), (I, 2), (W, 1), (W, 2)],
    "split_at_the_end": [(F, 0), (I, 0), (F, 1), (I, 1), (F, 2), (R, 2), (I, 2), (W, 0), (W, 1), (W, 2)],
    "split_and_whole": [(F, 0), (F, 1), (R, 1), (I, 0), (B, 1), (W, 0)],
    "mixed": [(F, 0), (F, 1), (R, 0), (B, 0), (F, 2), (B, 1), (R, 2), (B, 2)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", _stacks())
def test_a_stage_holds_what_is_predicted(name, order):
    layers = _stacks()[name]
    stage = Stage(_profiles(name, layers), is_last=False)
    for count in range(len(layers) + 1):
        steps = [(kind, i) for kind, i in ORDERS[order] if count or kind is not R]
        loads = heaviest_loads(Action(0, kind, i) for kind, i in steps)
        predicted = peak(loads, stage.costs(count))
        assert _measured(name, layers, range(count), steps) == predicted, count


def test_layers_that_must_not_recompute_are_kept():
    layers = _stacks()["embedding_first"]
    profiles = _profiles("embedding_first", layers)
    may = [False, True, False, True]
    from dataclasses import replace

    stage = Stage([replace(p, recomputable=m) for p, m in zip(profiles, may, strict=True)], is_last=False)
    assert stage.recomputable == (1, 3)
    steps = ORDERS["three_in_flight"]
    loads = heaviest_loads(Action(0, kind, i) for kind, i in steps)
    for count, dropped in enumerate([(), (1,), (1, 3)]):
        assert _measured("embedding_first", layers, dropped, steps) == peak(loads, stage.costs(count))


def test_a_profile_changes_nothing():
    layer = Residual(16, 4)
    weights = [p.clone() for p in layer.parameters()]
    x = torch.randn(3, 16, requires_grad=True)
    profiled = ProfiledLayer(layer, "Residual", recomputable=True)
    with torch.no_grad():
        outputs = profiled(x)
    assert torch.equal(outputs, layer(x))
    assert outputs.requires_grad
    assert outputs.grad_fn is None
    assert x.grad is None
    assert all(p.grad is None for p in layer.parameters())
    assert all(torch.equal(p, w) for p, w in zip(layer.parameters(), weights, strict=True))


def test_times_parameters_and_what_passes():
    layer = nn.Linear(64, 256)
    layer.bias.requires_grad_(False)
    profiled = ProfiledLayer(layer, "Linear", recomputable=True)
    with torch.no_grad():
        profiled(torch.randn(32, 64, requires_grad=True))
    profile = profiled.profile
    assert profile.forward > 0
    assert profile.recompute == profile.forward
    assert profile.input_grad > 0
    assert (profile.trained, profile.frozen) == (64 * 256, 256)
    # The gradient of the outputs, that of the inputs, and that of the largest parameter.
    assert profile.transient == 4 * (32 * 256 + 32 * 64 + 64 * 256)


class LetsGoLate(nn.Linear):
    """Holds a tensor beyond its forward, as a collective's thread may; not in the second call."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        self.held = x * 2 if self.calls != 2 else None
        return super().forward(x)


def test_what_another_thread_holds_for_a_moment_does_not_count():
    found = []
    for layer in (nn.Linear(64, 256), LetsGoLate(64, 256)):
        profiled = ProfiledLayer(layer, "layer", recomputable=True)
        with torch.no_grad():
            profiled(torch.randn(32, 64, requires_grad=True))
        found.append(profiled.profile.transient)
    assert found[0] == found[1]


def test_a_frozen_layer_behind_no_gradient_has_no_backward():
    layer = nn.Linear(8, 8).requires_grad_(False)
    profiled = ProfiledLayer(layer, "Linear", recomputable=True)
    with torch.no_grad():
        outputs = profiled(torch.randn(4, 8))
    assert not outputs.requires_grad
    assert profiled.profile.saved == ()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_formulas_of_a_gpt_defer_what_a_real_one_does(dropout):
    """Attention on CPU keeps a little besides, and masks of dropout are as wide as what they mask."""
    shape = TransformerShape(
        hidden_size=HIDDEN, num_heads=4, num_layers=1, seq_length=SEQ, vocab_size=VOCAB, bytes_per_element=4
    )
    embedding, block, head = gpt_profile(shape, 2, DEVICES["a100-80gb"], dropout=dropout > 0)
    vector = 2 * SEQ * HIDDEN * 4
    x = torch.randn(2, SEQ, HIDDEN, requires_grad=True)
    head_layer = nn.Sequential(nn.LayerNorm(HIDDEN), TinyHead(0))
    for layer, formula in ((TinyBlock(0, dropout), block), (head_layer, head)):
        profiled = ProfiledLayer(layer, "layer", recomputable=True, with_deferral=True)
        with torch.no_grad():
            profiled(x)
        found = profiled.profile.deferral
        assert found.bytes == formula.deferral.bytes
        assert found.waiting == formula.deferral.waiting == ()
        if layer is not head_layer:  # without the loss, whose log-probabilities would make room
            assert abs(found.growth - formula.deferral.growth) <= vector, (found, formula.deferral)
    assert embedding.deferral == Deferral((), 0)
