"""Emulated layers: what they wait for, and that they are layers like any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ext.recompute.regions import MicrobatchRegions
from ext.runtime.split_backward import WeightGradQueue
from ext.testing import emulated
from ext.testing.emulated import EmulatedLayer, EmulatedTimes, emulate

FORWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = 1.0, 2.0, 3.0, 4.0
TIMES = EmulatedTimes(FORWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """What the layers wait for, in order, without waiting."""
    recorded: list[float] = []
    monkeypatch.setattr(emulated, "wait", recorded.append)
    return recorded


def _input(requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_full_backward_takes_both_parts(waits, requires_grad):
    layer, x = EmulatedLayer(TIMES), _input(requires_grad)
    out = layer(x)
    assert waits == [FORWARD]
    out.sum().backward()
    assert sorted(waits[1:]) == [INPUT_GRAD, WEIGHT_GRAD]


def test_gradients_are_those_of_a_product(waits):
    layer, x = EmulatedLayer(TIMES), _input()
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 9.0))
    scale = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    (layer(x) * scale).sum().backward()
    plain_x, plain_weight = x.detach().requires_grad_(), layer.weight.detach().requires_grad_()
    (plain_x * plain_weight * scale).sum().backward()
    assert torch.equal(x.grad, plain_x.grad)
    assert torch.equal(layer.weight.grad, plain_weight.grad)


def test_a_split_backward_leaves_the_weight_to_w(waits):
    layer, x = EmulatedLayer(TIMES), _input()
    fused = layer(x)
    fused.sum().backward()
    want, x.grad, layer.weight.grad = (x.grad, layer.weight.grad), None, None
    waits.clear()

    queue = WeightGradQueue(limit=1)
    out = queue.intercepting(layer)(x)
    with queue.deferring(0, 0):
        out.sum().backward()
    assert waits == [FORWARD, INPUT_GRAD]
    assert layer.weight.grad is None
    queue.release(0, 0)
    assert waits == [FORWARD, INPUT_GRAD, WEIGHT_GRAD]
    assert torch.equal(x.grad, want[0])
    assert torch.equal(layer.weight.grad, want[1])


def test_backward_under_the_queue_without_deferring_takes_both_parts(waits):
    layer = EmulatedLayer(TIMES)
    WeightGradQueue(limit=0).intercepting(layer)(_input()).sum().backward()
    assert sorted(waits) == [FORWARD, INPUT_GRAD, WEIGHT_GRAD]
    assert layer.weight.grad is not None


@pytest.mark.parametrize("early", [True, False])
def test_a_rerun_takes_the_time_of_a_recompute(waits, early):
    layer, regions = EmulatedLayer(TIMES), MicrobatchRegions()
    out = regions.call(layer, _input())
    if early:
        regions.recompute()
        assert waits == [FORWARD, RECOMPUTE]
    with regions.backward():
        out.sum().backward()
    assert waits[:2] == [FORWARD, RECOMPUTE]
    assert sorted(waits[2:]) == [INPUT_GRAD, WEIGHT_GRAD]
    waits.clear()
    layer(_input())
    assert waits == [FORWARD]


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoint_is_a_rerun_too(waits, reentrant):
    layer = EmulatedLayer(TIMES)
    out = torch.utils.checkpoint.checkpoint(layer, _input(), use_reentrant=reentrant)
    out.sum().backward()
    assert waits[:2] == [FORWARD, RECOMPUTE]
    assert sorted(waits[2:]) == [INPUT_GRAD, WEIGHT_GRAD]


def test_times_of_all_layers_of_a_module(waits):
    module = nn.Sequential(EmulatedLayer(TIMES), nn.Identity(), EmulatedLayer(TIMES))
    emulate(module, EmulatedTimes(0.5, 2, 3).scaled(0.5))
    module(_input())
    assert waits == [0.25, 0.25]
    assert EmulatedTimes(0.5, 2, 3).rerun == 0.5
    assert TIMES.scaled(2) == EmulatedTimes(2, 4, 6, 8)


def test_nothing_waits_for_nothing(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    monkeypatch.setattr(emulated, "_queue", emulated._Queue())
    emulated.wait(0.25)
    assert clock.now == 100.5
    emulated.wait(0.0)
    assert clock.now == 100.5


@pytest.mark.parametrize("bad", [(-1, 0, 0), (0, float("nan"), 0), (0, 0, float("inf")), (0, 0, 0, -1)])
def test_times_that_cannot_be_waited_for(bad):
    with pytest.raises(ValueError, match="at least 0"):
        EmulatedTimes(*bad)


class Clock:
    """Stands in for the time module; what sleeps or computes moves it on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.computed = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.computed

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.25  # a sleep ends late

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds


def test_work_starts_where_the_work_before_ended_unless_the_host_waited(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    monkeypatch.setattr(emulated, "_queue", emulated._Queue())
    emulated.wait(2.0)
    assert clock.now == 102.25
    clock.compute(1.0)
    emulated.wait(3.0)
    assert clock.now == 102.0 + 3.0 + 0.25
    clock.now += 1.0  # a message
    emulated.wait(2.0)
    assert clock.now == 106.25 + 2.0 + 0.25
    clock.compute(10.0)  # hidden for as long as the work before
    emulated.wait(3.0)
    assert clock.now == 118.5 - 2.0 + 3.0 + 0.25
