"""Units recomputed under the all-reduces of tensor-parallel layers: bit for bit the gradients of no recompute."""

import random

import pytest
import torch
import torch.distributed as dist

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.rng import RngStream
from ext.recompute.report import ByteReserve
from ext.recompute.table import UnitTable, keep_all
from ext.recompute.unit_engine import MicrobatchUnits, UnitLayer
from ext.recompute.unit_run import Surroundings
from ext.recompute.windows import ON_DEMAND
from ext.testing import unit_layer
from ext.testing.ranks import run_ranks
from ext.testing.shared_unit_layer import SharedUnitLayer

pytestmark = pytest.mark.dist

HIDDEN, HEADS, SEQ, NUM_LAYERS = 16, 4, 6, 3
UNITS = [unit.name for unit in unit_layer.UnitLayer(HIDDEN, HEADS).units().units]
ATTENTION = ("ln1", "qkv", "scores", "probs", "dropped", "attention")
MLP = ("ln2", "fc1", "gelu")
IN_ORDER = "F0 F1 B0 F2 B1 F3 B2 B3"
"""One more forward than backwards in flight, as on the last stage but one."""
BACKWARD = UnitTable.of({**dict.fromkeys(ATTENTION, "B1"), **dict.fromkeys(MLP, "B2")})
FORWARD = UnitTable.of({**dict.fromkeys(ATTENTION, "F1"), **dict.fromkeys(MLP, "F2")})


def run(layers, tables, order, surroundings, dtype=torch.float32, stream=None):
    """Gradients of all parameters and inputs; the micro-batch of the next B in ``order`` is recomputed in an F."""
    for layer in layers:
        layer.zero_grad()
    if stream is not None:
        stream.restore(torch.Generator().manual_seed(40 + dist.get_rank()).get_state())
    steps = order.split()
    microbatches, outputs, inputs = {}, {}, {}
    for position, step in enumerate(steps):
        kind, number = step[0], int(step[1:])
        if kind == "F":
            torch.manual_seed(number)
            x = torch.randn(2, SEQ, HIDDEN, dtype=dtype).requires_grad_()
            inputs[number] = x
            coming = next(int(later[1:]) for later in steps[position:] if later[0] == "B")
            microbatches[number] = MicrobatchUnits(surroundings, microbatches.get(coming))
            for layer, table in zip(layers, tables, strict=True):
                x = UnitLayer(layer, microbatches[number], table)(x)
            outputs[number] = x
        else:
            torch.manual_seed(100 + number)
            with microbatches[number].backward():
                outputs.pop(number).square().mean().backward()
    return [p.grad.clone() for layer in layers for p in layer.parameters()] + [x.grad for x in inputs.values()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def shared_layers(group, stream, dropout=0.2, flash=False, dtype=torch.float32):
    options = {"dropout": dropout, "flash": flash, "dtype": dtype}
    return [SharedUnitLayer(HIDDEN, HEADS, group, stream=stream, seed=i, **options) for i in range(NUM_LAYERS)]


def counted(layers, stream, tables, order=IN_ORDER, limit=None):
    """Gradients, and units recomputed by window."""
    surroundings = Surroundings(trackers=(stream,), reserve=ByteReserve(limit))
    gradients = run(layers, tables, order, surroundings, stream=stream)
    assert surroundings.reserve.live == 0
    assert surroundings.report.repeated == 0
    return gradients, {name: use.units for name, use in surroundings.report.windows.items()}


def random_tables(generator):
    windows = ["keep", ON_DEMAND, "P", "F1", "F2", "B1", "B2", "no_such_window"]
    return [UnitTable.of({name: generator.choice(windows) for name in UNITS}) for _ in range(NUM_LAYERS)]


def windows(rank, world_size):
    group, stream = TensorParallelGroup.of(dist.group.WORLD), RngStream(0)
    found, layers = {}, shared_layers(group, stream)
    nothing = [keep_all([])] * NUM_LAYERS
    expected, used = counted(layers, stream, nothing)
    found["nothing"] = True, used
    for name, table in (("B", BACKWARD), ("F", FORWARD)):
        gradients, used = counted(layers, stream, [table] * NUM_LAYERS)
        found[name] = same(gradients, expected), used
    uneven = [FORWARD, keep_all([]), keep_all([])]
    gradients, used = counted(layers, stream, uneven)
    found["uneven F"] = same(gradients, expected), used
    gradients, used = counted(layers, stream, [BACKWARD] * NUM_LAYERS, limit=0)
    found["no reserve"] = same(gradients, expected), used
    order = "F0 B0 F1 B1 F2 B2 F3 B3"
    gradients, used = counted(layers, stream, [FORWARD] * NUM_LAYERS, order)
    found["one in flight"] = (
        same(gradients, run(layers, nothing, order, Surroundings(trackers=(stream,)), stream=stream)),
        used,
    )
    generator = random.Random(7)
    for number in range(12):  # the same tables on every rank, as a policy gives them
        gradients, _ = counted(layers, stream, random_tables(generator), limit=generator.choice([None, 0, 3000]))
        found[f"random {number}"] = same(gradients, expected), {}
    flash = shared_layers(group, stream, flash=True)
    expected, _ = counted(flash, stream, nothing)
    gradients, used = counted(flash, stream, [BACKWARD, FORWARD, BACKWARD])
    found["flash"] = same(gradients, expected), {}
    found["whole"] = against_whole(group)
    return found


def against_whole(group):
    """The worst difference to whole layers in one process, in fp64 and without dropout, recomputed in every window."""
    options = {"dropout": 0.0, "dtype": torch.float64}
    whole = [unit_layer.UnitLayer(HIDDEN, HEADS, seed=i, **options) for i in range(NUM_LAYERS)]
    expected = run(whole, [keep_all([])] * NUM_LAYERS, IN_ORDER, Surroundings(), torch.float64)
    names = [name for layer in whole for name, _ in layer.named_parameters()]
    found = run(
        shared_layers(group, None, **options), [BACKWARD, FORWARD, BACKWARD], IN_ORDER, Surroundings(), torch.float64
    )
    cuts = {"qkv.": (0, 3), "fc1.": (0, 1), "proj.weight": (1, 1), "fc2.weight": (1, 1)}
    worst = 0.0
    for position, (gradient, wanted) in enumerate(zip(found, expected, strict=True)):
        name = names[position] if position < len(names) else ""
        for prefix, cut in cuts.items():
            if name.startswith(prefix):
                wanted = group.shard(wanted, *cut)
        worst = max(worst, (gradient - wanted).abs().max().item())
    return worst


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_window_changes_a_number(world_size):
    for found in run_ranks(windows, world_size):
        assert found.pop("whole") < 1e-12
        assert [name for name, (is_same, _) in found.items() if not is_same] == []
        assert found["nothing"][1] == {}
        # Four micro-batches of three layers; the last layer has no next one, whose qkv would open its B2.
        assert found["B"][1] == {"B1": 4 * 3 * len(ATTENTION), "B2": 4 * 2 * len(MLP), ON_DEMAND: 4 * len(MLP)}
        # Forwards 1, 2 and 3 recompute for 0, 1 and 2; no forward comes before the last backward.
        on_demand = 3 * (len(ATTENTION) + len(MLP))
        assert found["F"][1] == {"F1": 3 * 3 * len(ATTENTION), "F2": 3 * 3 * len(MLP), ON_DEMAND: on_demand}
        assert found["uneven F"][1] == {"F1": 3 * len(ATTENTION), "F2": 3 * len(MLP), ON_DEMAND: on_demand // 3}
        assert set(found["no reserve"][1]) == {ON_DEMAND}
        assert set(found["one in flight"][1]) == {ON_DEMAND}
