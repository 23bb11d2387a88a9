"""Dropped layers give the gradients of kept layers, bit by bit, wherever the re-run happens."""

import gc

import pytest
import torch
from torch import nn

from ext.core.replay import is_replaying, remember
from ext.recompute.regions import DroppedLayer, MicrobatchRegions

NUM_MICROBATCHES = 3


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        hidden = nn.functional.gelu(self.fc1(x))
        return x + nn.functional.dropout(self.fc2(hidden), self.dropout)


class MaskedBlock(nn.Module):
    """Tensors in and out as a tuple, with an integer mask that is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, inputs):
        x, mask = inputs
        return self.block(x) * mask.unsqueeze(-1), mask


def _gradients(layers, inputs, order, dropped):
    """Parameter gradients, output by output, after running forward (F), recompute (R) and backward (B)."""
    torch.manual_seed(3)
    for layer in layers:
        layer.zero_grad()
    outputs, regions = {}, {}
    for kind, microbatch in order:
        if kind == "F":
            regions[microbatch] = MicrobatchRegions()
            x = inputs[microbatch]
            for index, layer in enumerate(layers):
                x = (DroppedLayer(layer, regions[microbatch]) if index in dropped else layer)(x)
            outputs[microbatch] = x[0] if isinstance(x, tuple) else x
        elif kind == "R":
            regions[microbatch].recompute()
        else:
            with regions[microbatch].backward():
                outputs[microbatch].square().mean().backward()
    reruns = sum(r.num_reruns for r in regions.values())
    return [p.grad.clone() for layer in layers for p in layer.parameters()], reruns, outputs


F_ALL = [("F", i) for i in range(NUM_MICROBATCHES)]
B_ALL = [("B", i) for i in range(NUM_MICROBATCHES)]
INTERLEAVED = [("F", 0), ("F", 1), ("R", 0), ("B", 0), ("F", 2), ("R", 1), ("R", 2), ("B", 1), ("B", 2)]


@pytest.mark.parametrize("order", [F_ALL + B_ALL, INTERLEAVED], ids=["on_demand", "early"])
@pytest.mark.parametrize("dropped", [{0, 1, 2}, {1}], ids=["all", "middle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bit_equal_with_dropout(order, dropped, dtype):
    torch.manual_seed(0)
    layers = [Block().to(dtype) for _ in range(3)]
    inputs = [torch.randn(2, 5, 16, dtype=dtype) for _ in range(NUM_MICROBATCHES)]
    forward_order = [step for step in order if step[0] != "R"]
    want, none, outputs = _gradients(layers, inputs, forward_order, set())
    got, reruns, again = _gradients(layers, inputs, order, dropped)
    assert none == 0
    assert reruns == NUM_MICROBATCHES * len(dropped)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert all(torch.equal(outputs[i], again[i]) for i in outputs)


def test_an_embedding_first_and_tuples_with_a_mask():
    torch.manual_seed(0)
    layers = [nn.Embedding(11, 16), Block(), nn.Linear(16, 11)]
    inputs = [torch.randint(0, 11, (2, 5)) for _ in range(NUM_MICROBATCHES)]
    want, _, _ = _gradients(layers, inputs, F_ALL + B_ALL, set())
    got, reruns, _ = _gradients(layers, inputs, INTERLEAVED, {0, 1, 2})
    assert reruns == 9
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))

    masked = [MaskedBlock(), MaskedBlock()]
    pairs = [(torch.randn(2, 5, 16), torch.randint(0, 2, (2, 5))) for _ in range(NUM_MICROBATCHES)]
    want, _, _ = _gradients(masked, pairs, F_ALL + B_ALL, set())
    got, _, _ = _gradients(masked, pairs, INTERLEAVED, {0, 1})
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def _num_alive(shape):
    gc.collect()
    return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor) and tuple(o.shape) == shape)


def test_activations_live_from_the_recompute_to_the_backward():
    layer = Block(dropout=0.0)
    regions = MicrobatchRegions()
    output = DroppedLayer(layer, regions)(torch.randn(7, 16))
    assert _num_alive((7, 64)) == 0
    regions.recompute()
    assert _num_alive((7, 64)) > 0
    with regions.backward():
        output.sum().backward()
    assert _num_alive((7, 64)) == 0


def test_extra_rng_streams_are_restored():
    class Tracker:
        def __init__(self):
            self.generator = torch.Generator().manual_seed(1)

        def capture(self):
            return self.generator.get_state()

        def restore(self, state):
            self.generator.set_state(state)

    tracker = Tracker()
    weight = nn.Parameter(torch.ones(1000))
    masks = []

    def noisy(x):
        masks.append(torch.rand(1000, generator=tracker.generator))
        return x * weight * masks[-1]

    regions = MicrobatchRegions([tracker])
    output = DroppedLayer(noisy, regions)(torch.ones(1000))
    state = tracker.capture()
    regions.recompute()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(state, tracker.capture())
    with regions.backward():
        output.sum().backward()
    assert torch.equal(weight.grad, masks[0])


def test_decisions_are_replayed():
    weight = nn.Parameter(torch.ones(4))
    decided, replays = [], []

    def decide():
        decided.append(len(decided))
        return decided[-1] + 2.0

    def layer(x):
        factor = remember(decide)
        replays.append(is_replaying())
        return (x * weight * factor).exp()

    regions = [MicrobatchRegions() for _ in range(2)]
    outputs = [DroppedLayer(layer, r)(torch.ones(4)) for r in regions]
    regions[0].recompute()
    for output, r in zip(outputs, regions, strict=True):
        with r.backward():
            output.sum().backward()
    assert decided == [0, 1]
    assert replays == [False, False, True, True]
