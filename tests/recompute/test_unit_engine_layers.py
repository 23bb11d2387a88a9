"""Layers of any units through the engine: what they may do comes back as it was, what they must not do is refused."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from ext.core.errors import ConfigError
from ext.core.replay import remember
from ext.recompute.report import ByteReserve
from ext.recompute.table import drop, keep_all
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import RecomputeError, Surroundings
from ext.recompute.units import LayerUnits, Unit, run_units
from ext.recompute.windows import ON_DEMAND


class Stream:
    """A named random number stream, as tensor-parallel hosts keep them beside the default one."""

    def __init__(self, seed):
        self.state = torch.Generator().manual_seed(seed).get_state()

    def capture(self):
        return self.state

    def restore(self, state):
        self.state = state

    @contextmanager
    def fork(self):
        keep = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(keep)


class Piecewise(nn.Module):
    """A layer of units given as functions, for what a transformer layer does not do."""

    def __init__(self, *units, inputs=("x",), outputs=()):
        super().__init__()
        self._units = LayerUnits(tuple(units), inputs, outputs)

    def units(self):
        return self._units

    def forward(self, inputs):
        return run_units(self._units, inputs if isinstance(inputs, tuple) else (inputs,))


def gradient(layer, x, table, surroundings=None, early=True):
    microbatch = MicrobatchUnits(surroundings)
    x = x.clone().requires_grad_()
    y = microbatch.call(layer, x, table)
    if early:
        microbatch.recompute()
    with microbatch.backward():
        y.square().sum().backward()
    return x.grad


def test_the_reserve_goes_to_the_layers_that_the_backward_meets_first():
    runs = []

    def layer(name):
        def fn(x):
            runs.append(name)
            return x.sin()

        return Piecewise(Unit("a", fn, ("x",)), Unit("b", torch.cos, ("a",)))

    layers = [layer(name) for name in ("first", "second", "third")]
    microbatch = MicrobatchUnits(Surroundings(reserve=ByteReserve(2 * 8 * 4)))
    x = torch.randn(8, requires_grad=True)
    for each in layers:
        x = microbatch.call(each, x, drop(["a"], "P"))
    del runs[:]
    microbatch.recompute()
    assert runs == ["third", "second"]
    x.sum().backward()
    assert runs == ["third", "second", "first"]


def test_named_streams_are_restored_and_left_as_they_were():
    stream = Stream(7)

    def noise(x):
        with stream.fork():
            return functional.dropout(x, 0.5)

    layer = Piecewise(Unit("a", noise, ("x",)), Unit("b", torch.sin, ("a",)), Unit("c", torch.exp, ("b",)))
    x, start = torch.randn(64), stream.capture()
    expected = gradient(layer, x, keep_all(["a", "b"]))
    after = stream.capture()
    for window in ("P", ON_DEMAND):
        stream.restore(start)
        found = gradient(layer, x, drop(["a", "b"], window), Surroundings(trackers=(stream,)))
        assert torch.equal(found, expected)
        assert torch.equal(stream.capture(), after)


def test_decisions_are_replayed():
    asked = []

    def route(x):
        def decide():
            asked.append(1)
            return len(asked)

        return x.sin() * remember(decide)

    layer = Piecewise(Unit("a", route, ("x",)), Unit("b", torch.sin, ("a",)), Unit("c", torch.exp, ("b",)))
    x = torch.randn(8)
    expected = gradient(layer, x, keep_all(["a", "b"]))
    del asked[:]
    assert torch.equal(gradient(layer, x, drop(["a", "b"])), expected)
    assert len(asked) == 1


def test_units_with_communication_wait_for_the_backward_and_kept_ones_never_run_twice():
    runs = []

    def logged(name):
        def fn(x):
            runs.append(name)
            return x.sin()

        return fn

    layer = Piecewise(
        Unit("a", logged("a"), ("x",)),
        Unit("reduce", logged("reduce"), ("a",), communication=True),
        Unit("b", logged("b"), ("reduce",)),
        Unit("route", logged("route"), ("b",), keep=True),
        Unit("d", logged("d"), ("route",)),
    )
    microbatch = MicrobatchUnits()
    y = microbatch.call(layer, torch.randn(8, requires_grad=True), drop(["a", "reduce", "b", "route", "d"], "P"))
    del runs[:]
    microbatch.recompute()
    assert runs == ["a"]  # b reads what the collective would have to bring back
    y.sum().backward()
    assert runs == ["a", "reduce", "b"]


@pytest.mark.parametrize("window", [ON_DEMAND, "P"])
def test_several_inputs_and_outputs(window):
    layer = Piecewise(
        Unit("a", lambda x, scale: x * 2 if scale is None else x * scale, ("x", "scale")),
        Unit("b", lambda a, mask: a.sin() * mask, ("a", "mask")),
        Unit("c", lambda b, mask: (b * mask).exp(), ("b", "mask")),
        inputs=("x", "mask", "scale"),
        outputs=("c", "mask"),
    )
    x, mask = torch.randn(8, requires_grad=True), torch.tensor([1, 0] * 4)
    y, _ = layer((x, mask, None))
    (expected,) = torch.autograd.grad(y.sum(), x)
    microbatch = MicrobatchUnits()
    found, passed = microbatch.call(layer, (x, mask, None), drop(["a", "b"], window))
    assert passed is mask
    microbatch.recompute()
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], expected)
    with pytest.raises(ConfigError, match="x, mask, scale"):
        MicrobatchUnits().call(layer, (x, mask), drop(["a"]))


def test_views_bring_back_the_storage_they_share():
    layer = Piecewise(
        Unit("wide", lambda x: torch.stack([x.sin(), x.cos()]).permute(1, 0), ("x",)),
        Unit("left", lambda wide: wide[:, 0], ("wide",)),
        Unit("mixed", lambda left, wide: left.exp() * wide[:, 1], ("left", "wide")),
        Unit("y", torch.sin, ("mixed",)),
    )
    x = torch.randn(8)
    expected = gradient(layer, x, keep_all([]))
    for names in (["wide"], ["left"], ["wide", "left"], ["wide", "mixed"], ["wide", "left", "mixed"]):
        for window in ("P", ON_DEMAND):
            assert torch.equal(gradient(layer, x, drop(names, window)), expected)


def test_changes_in_place_of_what_is_recomputed_are_refused():
    layer = Piecewise(
        Unit("a", torch.sin, ("x",)),
        Unit("b", lambda a: a.add_(1), ("a",)),
        Unit("c", torch.square, ("b",)),
    )
    x = torch.randn(4)
    for names in (["a"], ["a", "b"]):
        with pytest.raises(RecomputeError, match="'a' was changed in place"):
            gradient(layer, x, drop(names))
    # The storage of b is that of a, which is kept.
    assert torch.equal(gradient(layer, x, drop(["b"])), gradient(layer, x, keep_all([])))


def test_later_changes_in_place_are_found():
    layer = Piecewise(Unit("a", torch.sin, ("x",)), Unit("b", torch.exp, ("a",)), Unit("c", torch.sin, ("b",)))
    for table in (drop(["a"]), drop(["b"]), keep_all([])):
        x = torch.randn(4, requires_grad=True)
        inner = x * 1
        y = MicrobatchUnits().call(layer, inner, table)
        with torch.no_grad():
            inner.add_(1)
        with pytest.raises(RecomputeError, match="in place"):
            y.sum().backward()


def test_a_changed_input_of_a_recompute_is_found():
    layer = Piecewise(Unit("a", lambda x: 2 * x, ("x",)), Unit("b", torch.sin, ("a",)), Unit("c", torch.neg, ("b",)))
    inner = torch.randn(4, requires_grad=True) * 1
    y = MicrobatchUnits().call(layer, inner, drop(["a", "b"]))
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RecomputeError, match="'x' was changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("late", [lambda x: x.sin() * x.cos(), lambda x: x.sin().double(), lambda x: x.sin()[:2]])
def test_a_unit_that_runs_differently_the_second_time_is_refused(late):
    runs = []

    def moody(x):
        runs.append(1)
        return x.sin() if len(runs) == 1 else late(x)

    layer = Piecewise(Unit("a", moody, ("x",)), Unit("b", torch.exp, ("a",)), Unit("c", torch.sin, ("b",)))
    y = MicrobatchUnits().call(layer, torch.randn(4, requires_grad=True), drop(["a", "b"]))
    with pytest.raises(RecomputeError, match="unit 'a' ran differently"):
        y.sum().backward()


def test_a_unit_with_running_statistics_is_not_run_twice():
    norm = nn.BatchNorm1d(4)
    layer = Piecewise(Unit("a", norm, ("x",)), Unit("b", torch.exp, ("a",)), Unit("c", torch.sin, ("b",)))
    layer.norm = norm
    x = torch.randn(8, 4, requires_grad=True)
    with pytest.raises(RecomputeError, match="running statistics"):
        MicrobatchUnits().call(layer, x, drop(["a"]))
    MicrobatchUnits().call(layer, x, drop(["b"])).sum().backward()
    norm.eval()
    MicrobatchUnits().call(layer, x, drop(["a"])).sum().backward()


def test_what_nobody_reads_is_never_brought_back():
    surroundings = Surroundings()
    layer = Piecewise(Unit("a", torch.sin, ("x",)), Unit("b", lambda a: a + 1, ("a",)), Unit("c", torch.neg, ("b",)))
    gradient(layer, torch.randn(4), drop(["a", "b"], "P"), surroundings)
    assert surroundings.report.num_recomputed == 0
    assert surroundings.report.saved_bytes == 0


def test_units_return_one_tensor():
    layer = Piecewise(Unit("a", lambda x: (x, x), ("x",)))
    with pytest.raises(RecomputeError, match="'a' returned tuple"):
        MicrobatchUnits().call(layer, torch.randn(4, requires_grad=True), drop([]))


def test_every_run_of_a_unit_is_inside_the_given_context():
    entered = []

    @contextmanager
    def around():
        entered.append(1)
        yield

    layer = Piecewise(Unit("a", torch.sin, ("x",)), Unit("b", torch.exp, ("a",)), Unit("c", torch.sin, ("b",)))
    gradient(layer, torch.randn(4), drop(["a", "b"]), Surroundings(around=around))
    assert len(entered) == 3 + 2


@pytest.mark.parametrize("early", [False, True])
def test_a_recompute_finds_the_default_device_of_the_forward(early):
    class Shifted(nn.Module):
        def units(self):
            return [
                Unit("shifted", lambda x: x + torch.ones(3), ("x",)),
                Unit("squared", lambda x: x * x, ("shifted",)),
            ]

    x = torch.arange(3.0).requires_grad_()
    microbatch = MicrobatchUnits()
    with torch.device("cpu"):
        output = microbatch.call(Shifted(), x, drop(["shifted"], "P" if early else ON_DEMAND))
    with torch.device("meta"):
        if early:
            microbatch.recompute()
        with microbatch.backward():
            output.backward(torch.ones(3, device="cpu"))
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
