"""The unit engine against plain autograd: every gradient bit for bit, whatever the table, order and precision."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ext.core.errors import ConfigError
from ext.core.replay import remember
from ext.recompute.report import ByteReserve
from ext.recompute.table import KEEP, OPAQUE, UnitTable, drop, keep_all
from ext.recompute.unit_engine import MicrobatchUnits, UnitLayer
from ext.recompute.unit_run import RecomputeError, Surroundings
from ext.recompute.units import LayerUnits, Unit, run_units
from ext.recompute.windows import ON_DEMAND
from ext.runtime.live_bytes import LiveBytes
from ext.runtime.split_backward import WeightGradQueue
from ext.testing import unit_layer

HIDDEN, HEADS, SEQ = 16, 2, 6
UNITS = [unit.name for unit in unit_layer.UnitLayer(HIDDEN, HEADS).units().units]
FLASH_UNITS = [unit.name for unit in unit_layer.UnitLayer(HIDDEN, HEADS, flash=True).units().units]
PLAIN = "F0 B0 F1 B1 F2 B2"
INTERLEAVED = "F0 F1 R0 B0 F2 R1 B1 R2 B2"
NOTHING = keep_all(UNITS)


def block(seed=0, **options):
    return unit_layer.UnitLayer(HIDDEN, HEADS, seed=seed, **{"dropout": 0.2, **options})


def run(layers, tables, order, surroundings=None, dtype=torch.float32, context=nullcontext):
    """Gradients of all parameters and inputs after the steps of ``order``, with a mask seed per micro-batch."""
    for layer in layers:
        layer.zero_grad()
    surroundings = surroundings or Surroundings()
    microbatches, outputs, inputs = {}, {}, {}
    for step in order.split():
        kind, number = step[0], int(step[1:])
        if kind == "F":
            torch.manual_seed(number)
            x = torch.randn(2, SEQ, HIDDEN).to(dtype).requires_grad_()
            inputs[number] = x
            microbatches[number] = MicrobatchUnits(surroundings)
            with context():
                for layer, table in zip(layers, tables, strict=True):
                    x = UnitLayer(layer, microbatches[number], table)(x)
            outputs[number] = x
        elif kind == "R":
            microbatches[number].recompute()
        else:
            torch.manual_seed(100 + number)  # a backward that finds other random numbers than the forward did
            before = torch.get_rng_state()
            with microbatches[number].backward():
                outputs.pop(number).float().square().mean().backward()
            assert torch.equal(before, torch.get_rng_state())
    parameters = {id(p): p for layer in layers for p in layer.parameters()}
    return [p.grad.clone() for p in parameters.values()] + [x.grad for x in inputs.values()]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def reference(layers, **options):
    """The same without the engine."""
    plain = [_Plain(layer) for layer in layers]
    return run(plain, [UnitTable(())] * len(layers), PLAIN, **options)


class _Plain(nn.Module):
    """Hides the units of a layer; its region is kept, so the engine only calls it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("window", [ON_DEMAND, "P"])
def test_gradients_are_those_of_no_recompute(dtype, flash, window):
    layers = [block(i, flash=flash, dtype=dtype) for i in range(2)]
    names = FLASH_UNITS if flash else UNITS
    expected = reference(layers, dtype=dtype)
    surroundings = Surroundings()
    tables = [drop(names, window), drop(["ln1", "gelu"], window)]
    assert same(run(layers, tables, INTERLEAVED, surroundings, dtype), expected)
    # All but the layer's output, and two units of the other layer, for three micro-batches.
    assert surroundings.report.num_recomputed == 3 * (len(names) - 1 + 2)
    assert set(surroundings.report.windows) == {window}
    assert surroundings.report.repeated == 0
    assert surroundings.reserve.live == 0


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*UNITS, "no_such_unit"]),
            st.sampled_from([KEEP, ON_DEMAND, "P", "F1", "B2", "unused", "no_such_window"]),
        ),
        min_size=2,
        max_size=2,
    ),
    st.sampled_from([PLAIN, INTERLEAVED, "F0 F1 F2 R2 R0 B0 R1 B1 B2", "F0 R0 R0 B0 F1 F2 B1 R2 B2"]),
    st.sampled_from([None, 0, 3000]),
)
@settings(max_examples=40, deadline=None)
def test_no_table_changes_a_number(decisions, order, limit):
    layers = [block(1), block(2)]
    surroundings = Surroundings(reserve=ByteReserve(limit))
    tables = [UnitTable.of(each) for each in decisions]
    assert same(run(layers, tables, order, surroundings), reference(layers))
    dropped = [{name for name in table.dropped if name in UNITS[:-1]} for table in tables]
    assert surroundings.report.num_recomputed <= 3 * sum(map(len, dropped))
    assert surroundings.report.repeated == 0
    assert surroundings.reserve.live == 0


def test_an_early_recompute_leaves_nothing_for_the_backward():
    surroundings = Surroundings()
    table = UnitTable.of({"ln1": "P", "probs": "P", "dropped": ON_DEMAND, "gelu": "F2"})
    run([block()], [table], "F0 R0 B0", surroundings)
    windows = {name: use.units for name, use in surroundings.report.windows.items()}
    assert windows == {"P": 2, "F2": 1, ON_DEMAND: 1}


def test_without_an_r_action_everything_comes_on_demand():
    surroundings = Surroundings()
    run([block()], [drop(["ln1", "gelu"], "P")], "F0 B0", surroundings)
    assert {name: use.units for name, use in surroundings.report.windows.items()} == {ON_DEMAND: 2}


def test_the_byte_reserve_puts_off_what_exceeds_it():
    surroundings = Surroundings(reserve=ByteReserve(SEQ * HIDDEN * 2 * 4 * 6))
    layers = [block(i) for i in range(3)]
    assert same(
        run(layers, [drop(["ln1", "gelu"], "P")] * 3, "F0 R0 B0", surroundings), run(layers, [NOTHING] * 3, "F0 B0")
    )
    # The reserve holds six activations. ln1 takes one and its statistics, gelu four: the last layer, which the backward
    # meets first, gets both, and neither fits a second time.
    assert surroundings.report.windows["P"].units == 1 + 1
    assert surroundings.report.windows[ON_DEMAND].units == 6 - 2
    assert surroundings.report.skipped == 4
    assert surroundings.reserve.peak >= surroundings.reserve.limit * 0.8


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


def test_dropped_bytes_are_freed_and_counted():
    layer, names = block(), ["probs", "dropped", "gelu"]
    x = torch.randn(2, SEQ, HIDDEN, requires_grad=True)

    def held(table):
        surroundings = Surroundings()
        counter = LiveBytes([x, *layer.parameters()])
        with counter.created():
            y = MicrobatchUnits(surroundings).call(layer, x, table)
            gc.collect()
            assert y.requires_grad
            return counter.now, surroundings.report.saved_bytes

    kept, nothing = held(NOTHING)
    less, saved = held(drop(names))
    assert nothing == 0
    scores = 2 * HEADS * SEQ * SEQ * 4
    # Probabilities, the same after dropout, and the mask, which the CPU scales in floats; and the gelu's output.
    assert saved == 3 * scores + 2 * SEQ * 4 * HIDDEN * 4
    # The scores stay for the recompute of probs, where otherwise nobody needs them.
    assert kept - less == saved - scores


def test_values_go_with_the_graph_when_no_backward_comes():
    surroundings = Surroundings()
    microbatch = MicrobatchUnits(surroundings)
    y = microbatch.call(block(), torch.randn(2, SEQ, HIDDEN, requires_grad=True), drop(UNITS, "P"))
    microbatch.recompute()
    assert surroundings.reserve.live > 0
    del y
    gc.collect()
    assert surroundings.reserve.live == 0
    microbatch.recompute()  # nothing is left to recompute
    assert surroundings.reserve.live == 0


def test_a_second_backward_recomputes_again():
    layer = block()
    x = torch.randn(2, SEQ, HIDDEN, requires_grad=True)
    surroundings = Surroundings()
    unit = MicrobatchUnits(surroundings)
    torch.manual_seed(0)
    y = unit.call(layer, x, drop(UNITS)).square().sum()
    first = torch.autograd.grad(y, [x, *layer.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *layer.parameters()])
    assert same(first, second)
    assert surroundings.report.repeated > 0
    assert surroundings.reserve.live == 0


def test_one_layer_twice_in_a_micro_batch():
    layer = block()
    expected = reference([layer, layer])
    assert same(run([layer, layer], [drop(UNITS, "P"), drop(UNITS)], INTERLEAVED), expected)


def test_weights_shared_between_layers():
    layers = [block(0), block(1)]
    layers[1].fc1.weight = layers[0].fc1.weight
    layers[1].proj = layers[0].proj
    expected = reference(layers)
    assert same(run(layers, [drop(UNITS), drop(UNITS, "P")], INTERLEAVED), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_entered_again(inside):
    layers = [block(0), block(1)]

    @contextmanager
    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            yield

    expected = reference(layers, context=autocast)
    assert not same(expected, reference(layers))
    tables = [drop(UNITS), drop(UNITS, "P")]
    with autocast() if inside else nullcontext():
        assert same(run(layers, tables, INTERLEAVED, context=autocast), expected)


def test_units_may_be_compiled():
    def compiled(fn):
        return torch.compile(fn, backend="aot_eager")

    layers = [block(0, compile_unit=compiled, flash=True), block(1)]
    expected = run(layers, [keep_all(FLASH_UNITS), NOTHING], PLAIN)
    surroundings = Surroundings()
    tables = [drop(FLASH_UNITS), drop(UNITS, "P")]
    assert same(run(layers, tables, INTERLEAVED, surroundings), expected)
    assert surroundings.report.repeated == 0


def test_frozen_weights_and_inputs_without_gradient():
    layer = block()
    for parameter in (*layer.norm1.parameters(), *layer.qkv.parameters(), layer.fc2.weight):
        parameter.requires_grad_(False)
    x = torch.randn(2, SEQ, HIDDEN)

    def gradients(table):
        torch.manual_seed(3)
        microbatch = MicrobatchUnits()
        y = microbatch.call(layer, x, table)
        microbatch.recompute()
        trained = [p for p in layer.parameters() if p.requires_grad]
        with microbatch.backward():
            return torch.autograd.grad(y.sum(), trained)

    assert same(gradients(drop(UNITS)), gradients(NOTHING))
    assert same(gradients(drop(UNITS, "P")), gradients(NOTHING))


def test_without_gradients_the_layer_is_just_called():
    layer = block(dropout=0.0)
    surroundings = Surroundings()
    x = torch.randn(2, SEQ, HIDDEN)
    with torch.no_grad():
        assert torch.equal(MicrobatchUnits(surroundings).call(layer, x, drop(UNITS)), layer(x))
    assert surroundings.report.saved_bytes == 0


def test_hooks_of_the_module_run_around_its_units():
    layer, calls = block(), []
    layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
    layer.register_forward_hook(lambda module, args, output: calls.append("after"))
    layer.register_full_backward_hook(lambda module, grads, _: calls.append("backward"))
    expected = reference([layer])
    del calls[:]
    surroundings = Surroundings()
    assert same(run([layer], [drop(UNITS)], "F0 F1 F2 B0 B1 B2", surroundings), expected)
    assert calls == ["before", "after"] * 3 + ["backward"] * 3
    assert surroundings.report.num_recomputed > 0
    assert "forward" not in vars(layer)


def test_layers_without_units_are_regions():
    layers = [_Plain(block(i)) for i in range(3)]
    expected = reference([layer.layer for layer in layers])
    tables = [drop([OPAQUE], "P"), drop([OPAQUE]), keep_all([OPAQUE])]
    assert same(run(layers, tables, INTERLEAVED), expected)
    microbatch = MicrobatchUnits()
    x = torch.randn(2, SEQ, HIDDEN, requires_grad=True)
    for layer, table in zip(layers, tables, strict=True):
        x = microbatch.call(layer, x, table)
    microbatch.recompute()
    assert microbatch.num_reruns == 1  # the first layer; the second waits for the backward
    with microbatch.backward():
        x.sum().backward()
    assert microbatch.num_reruns == 2


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


def test_deferred_weight_gradients_see_recomputed_inputs():
    queue = WeightGradQueue(limit=1)

    def intercepted(fn):
        return lambda *args: queue.intercepting(lambda given: fn(*given))(args)

    expected = run([block(0), block(1)], [NOTHING] * 2, "F0 B0")
    layers = [block(0, compile_unit=intercepted), block(1, compile_unit=intercepted)]
    surroundings = Surroundings()
    microbatch = MicrobatchUnits(surroundings)
    torch.manual_seed(0)
    x = inputs = torch.randn(2, SEQ, HIDDEN).requires_grad_()
    for layer in layers:
        x = microbatch.call(layer, x, drop(UNITS, "P"))
    microbatch.recompute()
    with microbatch.backward(), queue.deferring(0, 0):
        x.square().mean().backward()
    assert layers[0].fc1.weight.grad is None
    queue.release(0, 0)
    found = [p.grad for layer in layers for p in layer.parameters()] + [inputs.grad]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert surroundings.report.repeated == 0


def test_what_waits_for_w_does_not_depend_on_what_is_recomputed():
    """Inputs of the weights' operations and gradients of their outputs; all else goes in I, recomputed or kept."""
    waiting, after_forward = set(), set()
    for table in (NOTHING, drop(UNITS, "P"), drop(UNITS), drop(["ln1", "gelu", "fc1"])):
        layers = [block(0), block(1)]
        counter = LiveBytes(parameter for layer in layers for parameter in layer.parameters())
        queue = WeightGradQueue(limit=1, note=counter.note)
        at = Surroundings(around=queue.interception, note=counter.note)
        microbatch = MicrobatchUnits(at)
        torch.manual_seed(0)
        x = torch.randn(2, SEQ, HIDDEN).requires_grad_()
        for layer in layers:
            x = microbatch.call(layer, x, table)
        after_forward.add(counter.now)
        microbatch.recompute()
        with microbatch.backward(), queue.deferring(0, 0):
            x.square().mean().backward()
        del x, microbatch
        assert at.reserve.live == 0
        waiting.add(counter.now)
        queue.release(0, 0)
        assert counter.now == 0
    assert len(after_forward) == 3
    (left,) = waiting
    assert left > 0


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
