"""Measured all-reduces become windows of the solvers: where they are, how large, and who has them."""

import time
from dataclasses import dataclass, replace

import pytest
import torch

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.recompute.heu import solve_heu
from ext.recompute.profile import profile_layer
from ext.recompute.profile_file import UnitProfile, load_profile
from ext.recompute.stage_tables import StageLayers, solve_stage
from ext.recompute.units import ATTENTION, MLP, AllReduces, LayerCosts, UnitCosts
from ext.recompute.windows import all_reduce_windows
from ext.testing.shared_unit_layer import SharedUnitLayer

WAITS = AllReduces(3.0, 4.0, 1.0, 2.0)
LAYER = LayerCosts(
    (UnitCosts("a", (), 100, 1.0, half=ATTENTION), UnitCosts("m", (), 100, 1.0, half=MLP)), 10, all_reduces=WAITS
)


def decisions(layer, in_flight, exposed=0.0, num_layers=3, keep=0.0):
    held = in_flight * num_layers * (10 + 200 * keep) + 200 + num_layers * 200 * (in_flight > 1)
    stage = StageLayers((layer,) * num_layers, in_flight, int(held), forward_exposed=exposed)
    tables = solve_stage(stage, solve_heu)
    return {name: decision for table in tables.tables for name, decision in table.decisions}, tables


def test_every_wait_is_a_window_of_its_own():
    windows = {window.name: window for window in all_reduce_windows(WAITS, 2, 0.25)}
    assert {name: window.capacity for name, window in windows.items()} == {"F1": 3.0, "F2": 4.0, "B1": 1.0, "B2": 2.0}
    assert {name: window.exposed for name, window in windows.items()} == {"F1": 0.25, "F2": 0.25, "B1": 0, "B2": 0}
    # With one micro-batch in flight a forward has no other one's backward to work for.
    assert [window.name for window in all_reduce_windows(WAITS, 1, 0.0)] == ["B1", "B2"]


def test_the_backward_hides_what_fits():
    found, tables = decisions(LAYER, in_flight=1)
    assert found == {"a": "B1", "m": "B2"}
    assert tables.exposed == pytest.approx(1.0)  # the last layer has no next one
    slow = replace(LAYER, all_reduces=replace(WAITS, mlp_backward=0.5))
    assert decisions(slow, in_flight=1)[0]["a"] == "C"
    alone = replace(LAYER, all_reduces=None)
    assert set(decisions(alone, in_flight=1)[0].values()) == {"C"}


def test_the_forward_of_another_micro_batch_hides_the_rest():
    forward_only = replace(LAYER, all_reduces=AllReduces(3.0, 4.0, 0.0, 0.0))
    found, tables = decisions(forward_only, in_flight=4, exposed=0.25)
    assert set(found.values()) <= {"F1", "F2"}
    assert tables.exposed == pytest.approx(3 * 2 * 0.25)


def test_they_are_stored_with_the_units(tmp_path):
    path = tmp_path / "profile.json"
    UnitProfile({"layer": LAYER, "alone": replace(LAYER, all_reduces=None)}).save(path)
    loaded = load_profile(path).layers
    assert loaded["layer"].all_reduces == WAITS
    assert loaded["alone"].all_reduces is None


@dataclass(frozen=True)
class Slow(TensorParallelGroup):
    """One rank whose all-reduces take a time, as they do where others have to be waited for."""

    seconds: float = 0.0

    def start_all_reduce(self, tensor, op=None):
        return _Sleep(self.seconds)


class _Sleep:
    """Takes the time of the first wait, as a collective that is waited for at once does."""

    def __init__(self, seconds):
        self.seconds = seconds

    def wait(self):
        time.sleep(self.seconds)
        self.seconds = 0.0


def test_a_profile_measures_each_wait():
    x = torch.randn(2, 4, 16)
    layer = SharedUnitLayer(16, 2, TensorParallelGroup.alone(), dropout=0.1)
    assert profile_layer(layer, x).all_reduces is None
    for linear, seconds in ((layer.proj, 0.01), (layer.fc2, 0.02), (layer.fc1, 0.03), (layer.qkv, 0.04)):
        linear.group = Slow(None, 0, 1, seconds)
    found = profile_layer(layer, x, repeats=1).all_reduces
    assert found is not None
    waits = found.first_forward, found.second_forward, found.mlp_backward, found.attention_backward
    # A sleep may last longer, never shorter: any other order would fall below.
    assert all(wait >= 0.99 * least for wait, least in zip(waits, (0.01, 0.02, 0.03, 0.04), strict=True)), waits
