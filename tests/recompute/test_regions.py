"""Dropped layers give the gradients of kept layers, bit by bit, wherever the re-run happens."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

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


class Forgetful(nn.Module):
    """Saves other tensors when it runs again, as chosen."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.change = change

    def forward(self, x):
        if is_replaying() and self.change == "shape":
            x = torch.cat([x, x])
        if is_replaying() and self.change == "fewer":
            return x.detach()
        return (x * self.weight).exp()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "shape",
            r"saved \[3, 4\] float32 on cpu for its backward, and \[6, 4\] float32 on cpu when it was recomputed",
        ),
        ("fewer", "saved 2 tensors for its backward, and 2 fewer when it was recomputed"),
    ],
)
def test_a_layer_that_runs_differently_is_refused(change, message):
    regions = MicrobatchRegions()
    DroppedLayer(Forgetful(change), regions)(torch.ones(3, 4))
    with pytest.raises(CheckpointError, match=message):
        regions.recompute()


@pytest.mark.parametrize("early", [True, False])
def test_autocast_and_default_device_are_those_of_the_forward(early):
    torch.manual_seed(0)
    layer, x, seen = Block(), torch.randn(5, 16), []

    def watched(inputs):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_device()))
        return layer(inputs)

    def gradients(dropped):
        layer.zero_grad()
        regions = MicrobatchRegions()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            loss = (DroppedLayer(watched, regions) if dropped else watched)(x).square().mean()
        if early:
            regions.recompute()
        with regions.backward():
            loss.backward()
        return [p.grad.clone() for p in layer.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))
    assert seen == [(True, torch.device("meta"))] * 3


def test_a_graph_that_is_kept_gives_its_gradients_twice():
    torch.manual_seed(0)
    layer, regions = Block(), MicrobatchRegions()
    loss = DroppedLayer(layer, regions)(torch.randn(5, 16)).square().mean()
    with regions.backward():
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in layer.parameters()]
        loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(layer.parameters(), once, strict=True))
    assert regions.num_reruns == 1


class Square(torch.autograd.Function):
    """Asks for what it saved again and again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.clone())
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[1])


def test_a_function_may_ask_twice_for_what_it_saved():
    x, regions = torch.randn(5, requires_grad=True), MicrobatchRegions()
    output = DroppedLayer(Square.apply, regions)(x)
    with regions.backward():
        output.sum().backward()
    assert torch.equal(x.grad, 2 * x)
    assert regions.num_reruns == 1


def test_an_input_that_was_changed_is_found_out():
    regions = MicrobatchRegions()
    x = torch.randn(5, 16)
    DroppedLayer(Block(), regions)(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        regions.recompute()


@pytest.mark.parametrize("early", [True, False])
def test_layers_that_checkpoint_or_differentiate_inside(early):
    torch.manual_seed(0)
    inner, x = Block(), torch.randn(5, 16)

    def checkpointing(inputs):
        return checkpoint(inner, inputs.sin(), use_reentrant=False).cos()

    def differentiating(inputs):
        with torch.enable_grad():
            given = inputs.detach().requires_grad_()
            slope = torch.autograd.grad(inner(given).exp().sum(), given)[0]
        return (inner(inputs) * slope).sin()

    for layer in (checkpointing, differentiating):
        want, _, _ = _gradients_of(layer, inner, x, dropped=False, early=early)
        got, reruns, output = _gradients_of(layer, inner, x, dropped=True, early=early)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert reruns >= 1
        assert output.requires_grad


def _gradients_of(layer, owner, x, *, dropped, early):
    owner.zero_grad()
    torch.manual_seed(1)
    regions = MicrobatchRegions()
    output = (DroppedLayer(layer, regions) if dropped else layer)(x)
    if early:
        regions.recompute()
    with regions.backward():
        output.square().mean().backward()
    return [p.grad.clone() for p in owner.parameters()], regions.num_reruns, output


def test_what_is_no_tensor_is_passed_again_and_nothing_is_dropped_without_gradients():
    weight = nn.Parameter(torch.ones(4))
    seen = []

    def layer(inputs):
        x, scale, nothing = inputs
        seen.append((scale, nothing))
        return (x * weight * scale).exp()

    regions = MicrobatchRegions()
    output = DroppedLayer(layer, regions)((torch.ones(4), 2.0, None))
    with torch.no_grad():
        assert torch.equal(DroppedLayer(layer, regions)((torch.ones(4), 2.0, None)), output)
    with regions.backward():
        output.sum().backward()
    assert seen == [(2.0, None)] * 3
    assert regions.num_reruns == 1


def test_what_was_brought_back_goes_without_the_garbage_collector():
    layer = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))  # Tanh saves what it gives
    regions, kept = MicrobatchRegions(), []
    layer[1].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        output = DroppedLayer(layer, regions)(torch.randn(7, 16))
        with regions.backward():
            output.sum().backward()
        del output
        assert len(kept) == 2
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()
