"""A backward in two parts gives the gradients of a fused one, bit by bit, for any module."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ext.recompute.regions import DroppedLayer, MicrobatchRegions
from ext.runtime.split_backward import WeightGradQueue, active_queue

NUM_MICROBATCHES = 3
WIDTH = 16


class Block(nn.Module):
    """Attention, norms, dropout, a residual: everything of a transformer block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + functional.dropout(self.fc2(functional.gelu(self.fc1(self.norm2(x)))), self.dropout)


class Products(nn.Module):
    """The weights of GPT-2's Conv1D, of AutoTP's transposed matmul, of plain products, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH).mul(0.2) for _ in range(6))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        a, b, c, d, e, f = self.weights
        x = torch.addmm(self.bias, x.reshape(-1, WIDTH), a).reshape(x.shape)
        x = torch.matmul(x, b.transpose(-1, -2)).tanh() @ c
        x = torch.mm(x.flatten(0, -2), d).tanh().mm(mat2=e).view(x.shape)
        return functional.linear(x, f.view(2, -1).view(WIDTH, WIDTH))


class Convolutions(nn.Module):
    """Strided, grouped, dilated and transposed, in one and two dimensions, on ``(batch, seq, WIDTH)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.second = nn.Conv2d(1, 3, (3, 2), stride=2, dilation=(1, 2), bias=False)
        self.third = nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1)
        self.fourth = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")

    def forward(self, x):
        x = self.fourth(self.first(x.transpose(1, 2)))
        return self.third(self.second(x.unsqueeze(1)).tanh())


class TwoInputs(nn.Module):
    """A tuple in and out, one part of it an integer mask."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.bilinear = Block(), nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, inputs):
        x, mask = inputs if isinstance(inputs, tuple) else (inputs, torch.ones(inputs.shape[:-1], dtype=torch.int64))
        return self.block(x) * mask.unsqueeze(-1) + self.bilinear(x, x), mask


class Penalty(nn.Module):
    """Takes a gradient inside its forward and trains on it, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            (force,) = torch.autograd.grad(self.inner(x).tanh().square().sum(), x, create_graph=True)
        return self.outer(force) + x


def _first(output):
    return output[0] if isinstance(output, tuple) else output


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 5, WIDTH, generator=generator).to(dtype) for _ in range(NUM_MICROBATCHES)]


def _gradients(model, inputs, *, split, autocast=False, wrap=None):
    """Gradients of parameters and inputs; all forwards, then all backwards (I), then all W."""
    torch.manual_seed(11)
    queue = WeightGradQueue(limit=len(inputs))
    layers = [queue.intercepting(layer) if split else layer for layer in model]
    layers = [layer if wrap is None else wrap(layer) for layer in layers]
    xs, losses = [], []
    for microbatch in inputs:
        x = microbatch.clone()
        xs.append(x.requires_grad_() if x.is_floating_point() else x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for layer in layers:
                x = layer(x)
        losses.append(_first(x).float().square().mean())
    deferred = []
    for i, loss in enumerate(losses):
        if split:
            with queue.deferring(0, i):
                loss.backward()
            deferred.append(sum(len(jobs) for jobs in queue._jobs.values()))
        else:
            loss.backward()
    for i in range(len(losses) if split else 0):
        queue.release(0, i)
    assert len(queue) == 0
    grads = {name: p.grad for name, p in nn.ModuleList(model).named_parameters()}
    return grads, [x.grad for x in xs], deferred


def _check(model, inputs=None, *, num_deferred, exact=True, **kwargs):
    """The same model, fused and split; ``num_deferred`` weights per micro-batch wait for W."""
    inputs = _inputs() if inputs is None else inputs
    reference = copy.deepcopy(model)
    want, want_x, _ = _gradients(reference, inputs, split=False, **kwargs)
    got, got_x, deferred = _gradients(model, inputs, split=True, **kwargs)
    assert deferred == [num_deferred * (i + 1) for i in range(len(inputs))]
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None, name
        elif exact:
            assert torch.equal(gradient, got[name]), name
        else:
            torch.testing.assert_close(gradient, got[name], rtol=1e-12, atol=1e-14)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(want_x, got_x, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_transformer_blocks_with_dropout(dtype):
    _check([Block(0.3).to(dtype), Block(0.3).to(dtype)], _inputs(dtype), num_deferred=8)


def test_products_and_convolutions():
    torch.manual_seed(0)
    _check([Products().double()], _inputs(torch.float64), num_deferred=6, exact=False)
    # Padding given as a name is left to torch.
    _check([Convolutions().double()], _inputs(torch.float64), num_deferred=3, exact=False)


def test_tuples_and_operations_that_are_left_alone():
    _check([TwoInputs(), TwoInputs()], num_deferred=8)


def test_an_embedding_first_and_a_head():
    ids = [torch.randint(0, 32, (2, 5)) for _ in range(NUM_MICROBATCHES)]
    _check([nn.Embedding(32, WIDTH), Block(), nn.Linear(WIDTH, 32, bias=False)], ids, num_deferred=5)


def test_frozen_weights_and_adapters():
    model = [Block(), Block()]
    for name, parameter in nn.ModuleList(model).named_parameters():
        parameter.requires_grad_("0.fc1" in name or name == "1.qkv.bias")
    _check(model, num_deferred=1)
    nn.ModuleList(model).requires_grad_(False).zero_grad()
    _check(model, num_deferred=0)


def test_a_weight_used_twice_is_summed_in_another_order():
    model = [nn.Embedding(32, WIDTH), Block(), Block(), nn.Linear(WIDTH, 32, bias=False)]
    model[3].weight = model[0].weight
    model[2].fc1.weight = model[1].fc1.weight
    ids = [torch.randint(0, 32, (2, 5)) for _ in range(NUM_MICROBATCHES)]
    _check([layer.double() for layer in model], ids, num_deferred=9, exact=False)


def test_autocast():
    _check([Block(), Block()], num_deferred=8, autocast=True)


def test_a_gradient_taken_inside_the_forward_is_complete():
    _check([Penalty().double(), Penalty().double()], _inputs(torch.float64), num_deferred=4, exact=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant):
    def wrap(layer):
        return lambda x: checkpoint(layer, x, use_reentrant=reentrant)

    _check([Block(0.3), Block(0.3)], num_deferred=8, wrap=wrap)


@pytest.mark.parametrize("early", [True, False])
def test_dropped_layers(early):
    torch.manual_seed(0)
    model = [Block(0.3), Block(0.3)]
    reference = copy.deepcopy(model)
    inputs = _inputs()
    torch.manual_seed(11)
    want, _, _ = _gradients(reference, inputs, split=False)

    torch.manual_seed(11)
    queue = WeightGradQueue(limit=NUM_MICROBATCHES)
    regions = [MicrobatchRegions() for _ in inputs]
    losses = []
    for x, region in zip(inputs, regions, strict=True):
        for layer in model:
            x = DroppedLayer(queue.intercepting(layer), region)(x)
        losses.append(x.float().square().mean())
    for i, (loss, region) in enumerate(zip(losses, regions, strict=True)):
        if early:
            region.recompute()
        with queue.deferring(0, i), region.backward():
            loss.backward()
        assert region.num_reruns == len(model)
    for i in range(len(losses)):
        queue.release(0, i)
    for name, parameter in nn.ModuleList(model).named_parameters():
        assert torch.equal(parameter.grad, want[name]), name


def test_hooks_of_parameters_run_in_w():
    layer = nn.Linear(WIDTH, WIDTH)
    seen = []
    layer.weight.register_hook(lambda grad: grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = _inputs()[0]
    queue = WeightGradQueue(limit=1)
    loss = queue.intercepting(layer)(x).sum()
    with queue.deferring(0, 0):
        loss.backward()
    assert not seen
    assert layer.bias.grad is not None
    queue.release(0, 0)
    rows = x.reshape(-1, WIDTH)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], 2 * torch.ones(len(rows), WIDTH).t().mm(rows))


def test_only_inputs_and_output_gradients_live_until_w():
    def num_alive(columns):
        gc.collect()
        return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor and tuple(o.shape) == (7, columns))

    layer = nn.Sequential(nn.Linear(WIDTH, 31), nn.Softplus(), nn.Linear(31, 23))
    queue = WeightGradQueue(limit=1)
    loss = queue.intercepting(layer)(torch.randn(7, WIDTH)).sum()
    with queue.deferring(0, 0):
        loss.backward()
    del loss
    assert num_alive(31) > 0
    queue.release(0, 0)
    assert num_alive(31) == num_alive(23) == 0


def test_gradients_that_wait_are_noted():
    noted = []
    queue = WeightGradQueue(1, lambda grad: noted.append(tuple(grad.shape)))
    layer = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    run = queue.intercepting(layer)
    run(torch.randn(3, WIDTH)).sum().backward()
    assert noted == []  # nothing waited
    out = run(torch.randn(3, WIDTH))
    with queue.deferring(0, 0):
        out.sum().backward()
    assert noted == [(3, WIDTH), (3, 2 * WIDTH)]


def test_own_functions_can_defer():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.queue = active_queue()
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            ctx.queue.defer(lambda: torch.autograd.backward(weight, (grad * x).sum(0)))
            return grad * weight, None

    weight = nn.Parameter(torch.ones(4))
    queue = WeightGradQueue(limit=1)
    call = queue.intercepting(lambda x: Scale.apply(x, weight))
    call(torch.ones(3, 4)).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))
    loss = call(torch.ones(3, 4)).sum()
    with queue.deferring(0, 0):
        loss.backward()
    assert torch.equal(weight.grad, torch.full((4,), 3.0))
    queue.release(0, 0)
    assert torch.equal(weight.grad, torch.full((4,), 6.0))
    assert active_queue() is None


def test_a_compiled_layer_keeps_its_gradients_in_i():
    torch.manual_seed(0)
    block = Block()
    want, _, _ = _gradients([copy.deepcopy(block)], _inputs(), split=False)
    compiled = torch.compile(block, backend="aot_eager")
    _, _, deferred = _gradients([compiled], _inputs(), split=True)
    assert deferred == [0] * NUM_MICROBATCHES
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter.grad, want[f"0.{name}"])


def test_functorch_and_a_module_of_torch_are_left_alone():
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x, x, x)[0] + torch.func.vmap(self.linear)(x)

    _check([Attention()], num_deferred=0)


def test_the_queue_is_bounded():
    layer = nn.Linear(WIDTH, WIDTH)
    queue = WeightGradQueue(limit=1)
    losses = [queue.intercepting(layer)(x).sum() for x in _inputs()]
    with queue.deferring(0, 0):
        losses[0].backward()
    with pytest.raises(AssertionError, match="at most 1"), queue.deferring(0, 1):
        losses[1].backward()
