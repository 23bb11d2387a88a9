"""The unit engine against plain autograd: every gradient bit for bit, whatever the table, order and precision."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ext.recompute.report import ByteReserve
from ext.recompute.table import KEEP, OPAQUE, UnitTable, drop, keep_all
from ext.recompute.unit_engine import MicrobatchUnits, UnitLayer
from ext.recompute.unit_run import Surroundings
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
