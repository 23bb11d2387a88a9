"""Sub-pipelined layers give what the plain ones give, and run a collective of one part under the other's compute."""

import pytest
import torch
import torch.distributed as dist

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.sub_pipeline import run_sub_pipelined, sub_pipelined
from ext.testing.ranks import run_ranks
from ext.testing.shared_unit_layer import SharedUnitLayer

HIDDEN, HEADS, SEQ = 16, 4, 6


def layers_of(group, count=3, **options):
    options = {"dtype": torch.float64, "flash": True, **options}
    return [SharedUnitLayer(HIDDEN, HEADS, group, seed=i, **options) for i in range(count)]


def plain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def outcome(run, layers, x):
    """Output and gradients of one forward and backward."""
    for layer in layers:
        layer.zero_grad()
    x = x.clone().requires_grad_(x.requires_grad)
    y = run(layers, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def worst(first, second):
    assert [a is None for a in first] == [b is None for b in second]
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True) if a is not None)


class Logged(TensorParallelGroup):
    """Writes down what is launched and waited for."""

    events: list[str]

    def start_all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        number = sum(event.startswith("launch") for event in self.events)
        self.events.append(f"launch {number}")
        return _Waited(super().start_all_reduce(tensor, op), self.events, number)


class _Waited:
    def __init__(self, work, events, number):
        self._work, self._events, self._number = work, events, number

    def wait(self):
        self._events.append(f"wait {self._number}")
        self._work.wait()


def compare(rank, world_size):
    group = TensorParallelGroup.of(dist.group.WORLD)
    found = {}
    layers = layers_of(group)
    for batch in (1, 2, 3, 4):
        x = torch.randn(batch, SEQ, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))
        for requires_grad in (True, False):
            expected = outcome(plain, layers, x.requires_grad_(requires_grad))
            found[batch, requires_grad] = worst(outcome(run_sub_pipelined, layers, x), expected)
    for parameter in (*layers[0].parameters(), *layers[1].qkv.parameters()):
        parameter.requires_grad_(False)
    expected = outcome(plain, layers, x)
    found["frozen"] = worst(outcome(run_sub_pipelined, layers, x), expected)
    with torch.no_grad():
        found["no grad"] = (run_sub_pipelined(layers, x) - plain(layers, x)).abs().max().item()
    found["nothing to train"] = found_without_training(layers, x)
    object.__setattr__(log := Logged(group.group, group.rank, group.size), "events", [])
    y = run_sub_pipelined(layers_of(log, count=2), x.requires_grad_())
    forward = list(log.events)
    del log.events[:]
    y.sum().backward()
    return found, forward, list(log.events)


def found_without_training(layers, x):
    for layer in layers:
        layer.requires_grad_(False)
    y = run_sub_pipelined(layers, x.detach())
    assert not y.requires_grad
    return (y - plain(layers, x.detach())).abs().max().item()


@pytest.mark.dist
def test_equal_to_the_plain_layers_and_one_part_ahead():
    for found, forward, backward in run_ranks(compare, 2):
        assert {case: error for case, error in found.items() if error > 1e-12} == {}
        # Two layers of two segments; part a is launched, then b; a is waited for when b is on its way.
        expected = ["launch 0", "launch 1"]
        for number in range(2, 8):
            expected += [f"wait {number - 2}", f"launch {number}"]
        assert forward == [*expected, "wait 6", "wait 7"]
        assert backward == forward


def test_parts_draw_their_own_dropout_and_masks_stay():
    alone = TensorParallelGroup.alone()
    layers = layers_of(alone, dropout=0.5, flash=False)
    x = torch.randn(4, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = run_sub_pipelined(layers, x)
    torch.manual_seed(1)
    again = run_sub_pipelined(layers, x)
    assert torch.equal(y, again)
    # Each part's gradient is that of its own mask: the loss is linear in a direction of the weights it does not see.
    (gradient,) = torch.autograd.grad(y.sum(), x)
    step = 1e-6 * torch.randn_like(x)
    torch.manual_seed(1)
    change = (run_sub_pipelined(layers, x + step).sum() - y.sum()).item()
    assert change == pytest.approx((gradient * step).sum().item(), rel=1e-3)


def test_neighbours_of_one_group_run_together():
    first, second = TensorParallelGroup(None, 0, 1), TensorParallelGroup(None, 0, 2)
    norm = torch.nn.LayerNorm(HIDDEN)
    a, b, c = layers_of(first)
    (d,) = layers_of(second, count=1)
    standing = sub_pipelined([norm, a, b, norm, c, d])
    assert [index for index, layer in enumerate(standing) if layer is norm] == [0, 3]
    assert [layer.args[0] for layer in standing if hasattr(layer, "args")] == [[a, b], [c], [d]]
    x = torch.randn(2, SEQ, HIDDEN, dtype=torch.float64)
    assert standing[2](x) is x
    assert torch.equal(standing[1](x), run_sub_pipelined([a, b], x))


def test_a_second_backward_is_refused():
    alone = TensorParallelGroup.alone()
    x = torch.randn(2, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = run_sub_pipelined(layers_of(alone), x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        y.backward()
