"""Measured unit costs: bytes against what the engine saves, and the way into a file and back."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from ext.core.errors import ConfigError
from ext.cost.profile import LOSS, LayerProfile
from ext.recompute import profile
from ext.recompute.heu import solve_heu
from ext.recompute.problem import StageProblem
from ext.recompute.profile import fit_all_reduce, profile_layer, window_slowdown
from ext.recompute.profile_file import UnitProfile, load_profile
from ext.recompute.stage_tables import Part
from ext.recompute.table import KEEP, OPAQUE, drop, keep_all
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.recompute.windows import wait_window
from ext.runtime.live_bytes import LiveBytes
from ext.testing.ranks import run_ranks
from ext.testing.unit_layer import UnitLayer

BATCH, SEQ, HIDDEN, HEADS = 2, 16, 32, 4
FLOAT = 4


def block(flash=False, seed=0):
    return UnitLayer(HIDDEN, HEADS, dropout=0.1, flash=flash, seed=seed)


def batch(seed=0):
    return torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_bytes_counted_by_hand():
    costs = {unit.name: unit for unit in profile_layer(block(), batch(), repeats=1).units}
    row, scores = BATCH * SEQ * FLOAT, BATCH * HEADS * SEQ * SEQ * FLOAT
    assert costs["ln1"].bytes == row * HIDDEN + 2 * row  # the output, mean and deviation
    assert costs["fc1"].bytes == costs["gelu"].bytes == 4 * row * HIDDEN
    assert costs["dropped"].bytes == 2 * scores  # the output and the mask
    assert costs["probs"].bytes == scores
    assert costs["out"].bytes == row * HIDDEN  # the mask alone: the output is the next layer's input
    assert costs["out"].keep
    assert not costs["qkv"].needed  # copies of its thirds are saved by the products
    assert [name for name, unit in costs.items() if unit.uses_rng] == ["dropped", "residual", "out"]
    assert costs["residual"].inputs == ("attention",)
    assert costs["residual"].half == "mlp"


def test_a_profile_leaves_weights_gradients_and_random_numbers_alone():
    layer, x = block(), batch()
    before = torch.get_rng_state()
    costs = profile_layer(layer, x, repeats=1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in (*layer.parameters(), x))
    assert costs.input_bytes == BATCH * SEQ * HIDDEN * FLOAT
    assert all(unit.time > 0 for unit in costs.units)
    assert costs.backward > 0


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("names", [["ln1", "gelu"], ["qkv", "attention", "fc1"], None])
def test_the_engine_saves_what_the_profile_says(flash, names):
    layer, x = block(flash), batch()
    costs = profile_layer(layer, x, repeats=1)
    table = drop(names or [unit.name for unit in costs.units if not unit.keep])
    surroundings = Surroundings()
    MicrobatchUnits(surroundings).call(layer, x, table)
    expected = sum(unit.bytes for unit in costs.units if unit.needed and table[unit.name] != KEEP)
    if table["scores"] != KEEP and not flash:
        expected -= BATCH * HEADS * SEQ * SEQ * FLOAT  # of the scores, which recomputes read but no backward
    assert surroundings.report.saved_bytes == expected


def live_bytes(layers, tables, microbatches):
    """Bytes of activations and inputs after all forwards, the most there are at once, and the engine's report."""
    surroundings = Surroundings()
    parameters = [p for layer in layers for p in layer.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    counter = LiveBytes([*parameters, *(p.grad for p in parameters)])
    peaks = []
    with counter.created():
        inputs = [batch(number).detach().clone().requires_grad_() for number in range(microbatches)]
        runs, outputs = [], []
        for x in inputs:
            runs.append(MicrobatchUnits(surroundings))
            for layer, table in zip(layers, tables, strict=True):
                x = runs[-1].call(layer, x, table)
            outputs.append(x)
            peaks.append(counter.now)
        del x
        held = counter.now
        for microbatch in runs:
            microbatch.recompute()
            peaks.append(counter.now)
            with microbatch.backward():
                outputs.pop(0).sum().backward()
            inputs.pop(0)
    return held, max(peaks), surroundings


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("waits", [False, True])
def test_live_bytes_keep_within_the_plan(share, waits):
    layers, microbatches = [block(seed=i) for i in range(3)], 3
    costs = profile_layer(layers[0], batch(), repeats=1)
    budget = int(costs.activation_bytes * len(layers) * microbatches * share)
    windows = (wait_window(costs.forward, 0.0),) if waits else ()
    problem = StageProblem(costs, len(layers), microbatches, budget, windows)
    solution = solve_heu(problem)
    assert solution.bytes <= budget
    held, live, surroundings = live_bytes(layers, solution.tables, microbatches)
    outputs = microbatches * costs.input_bytes  # of the stage, which the plan counts with the next one
    assert live <= solution.bytes + outputs
    # And the plan is no idle bound: it is used up but for what is not needed at the same time.
    assert live >= 0.65 * solution.bytes
    everything, _, _ = live_bytes(layers, [keep_all([])] * 3, microbatches)
    saved = Part((0, 1, 2), problem, solution).saved_bytes
    assert everything - held == pytest.approx(microbatches * saved, rel=0.01)
    decided = {u.name: solution.tables[0][u.name] for u in costs.units}
    planned = sum(decision not in (KEEP, "unused") for decision in decided.values())
    assert surroundings.report.num_recomputed == planned * len(layers) * microbatches


def test_a_layer_without_units_is_one():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, inputs):
            x, mask = inputs
            return functional.gelu(x.sin() * self.weight) * mask, mask

    costs = profile_layer(Opaque(), (torch.randn(4, 8), torch.ones(8)), repeats=1)
    (unit,) = costs.units
    assert unit.name == OPAQUE
    # Saved are sin(x) and the products that gelu and the mask read; the output goes to the next layer.
    assert unit.bytes == pytest.approx(4 * 4 * 8 * FLOAT, abs=4 * 8 * FLOAT)
    assert not unit.keep
    assert costs.input_bytes == (4 * 8 + 8) * FLOAT
    assert solve_heu(StageProblem(costs, 2, 2, costs.activation_bytes * 4)).exposed == 0


def test_an_attribute_called_units_is_no_offer():
    linear = nn.Linear(8, 8)
    linear.units = 8
    assert [unit.name for unit in profile_layer(linear, torch.randn(2, 8), repeats=1).units] == [OPAQUE]


def test_a_profile_survives_a_file(tmp_path):
    costs = profile_layer(block(), batch(), repeats=1)
    profile = UnitProfile({"block": costs}, 1.25, {"device": "cpu", "shape": "2x16x32"})
    path = tmp_path / "units.json"
    profile.save(path)
    assert load_profile(path, {"device": "cpu", "other": "new"}) == profile
    with pytest.raises(ConfigError, match="device cpu, this run has cuda"):
        load_profile(path, {"device": "cuda"})


def _whole(name, input_bytes, recomputable=True):
    return LayerProfile(name, 1.0, 1.0, 1.0, 1.0, (input_bytes,), (0,), (0,), (0,), recomputable=recomputable)


def test_a_profile_of_a_pipeline_gives_every_layer_its_costs_back(tmp_path):
    small, large = (profile_layer(layer, batch(), repeats=1) for layer in (block(), block(flash=True)))
    size = small.input_bytes
    layers = [
        (_whole("Words", 8, recomputable=False), _whole("Block", size)),
        (_whole("Block", size), _whole("Block", size), _whole(LOSS, 4, recomputable=False)),
    ]
    slower = replace(small, units=tuple(replace(unit, time=unit.time + 1) for unit in small.units))
    units = [(None, slower), (large, small)]
    profile = UnitProfile.of(layers, units, device="cpu")
    assert profile.order == ("", "Block", "Block-2", "Block")
    profile.save(tmp_path / "units.json")
    read = load_profile(tmp_path / "units.json", {"device": "cpu"})
    assert read == profile
    # The fastest of a kind is what all of them can do.
    assert read.units(layers) == [(None, small), (large, small)]
    with pytest.raises(ConfigError, match="layer 3 took .* bytes, in this run 9999. Remove it"):
        read.units([layers[0], (*layers[1][:1], _whole("Block", 9999))])
    with pytest.raises(ConfigError, match="this run has , Block"):
        read.units(layers[:1])


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"format": 2}', '{"format": 2, "layers": {"a": {"units": [{"x": 1}]}}}']
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "units.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="measure"):
        load_profile(path)
    with pytest.raises(ConfigError, match="no unit profile"):
        load_profile(tmp_path / "missing.json")


def test_a_stored_graph_is_checked(tmp_path):
    costs = profile_layer(block(), batch(), repeats=1)
    path = tmp_path / "units.json"
    UnitProfile({"block": costs}).save(path)
    content = json.loads(path.read_text())
    content["layers"]["block"]["units"][0]["inputs"] = ["gelu"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="ln1"):
        load_profile(path)


def test_slowdown_is_never_below_one():
    class Done:
        def wait(self):
            pass

    assert window_slowdown(lambda: torch.ones(1000).sum(), Done) >= 1.0
    assert replace(wait_window(1.0, 0.0), slowdown=2.0).slowdown == 2.0


def _fit(rank, world_size):
    """With a clock that says what each size takes on this rank, so that the machine does not matter."""
    sizes, repeats = (2**12, 2**18, 2**21), 3
    times = iter([1e-4 * (1 + rank) + size / 1e9 for size in sizes for _ in range(repeats + 1)])
    profile.stopwatch = lambda device: lambda: lambda: next(times)
    return fit_all_reduce(torch.device("cpu"), sizes=sizes, repeats=repeats)


@pytest.mark.dist
def test_every_rank_fits_the_same_link():
    first, second = run_ranks(_fit, 2)
    assert first == second
    assert first.bandwidth == pytest.approx(1e9)  # half of two crossings
    assert first.latency == pytest.approx(2e-4 / 2)  # of the slower rank, over two steps
