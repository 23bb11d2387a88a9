"""The memory benchmark: its layers count what autograd holds, and its contestants run and keep their budgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ext.recompute.regions import DroppedLayer, MicrobatchRegions
from ext.runtime.split_backward import WeightGradQueue
from ext.testing.emulated import EmulatedTimes
from pipeline_bench.counted import CountedLayer, share_meter

NO_TIME = EmulatedTimes(0, 0, 0)
SCRIPT = Path(__file__).parents[2] / "run_scripts" / "bench_memory.py"


def test_layers_count_until_their_backward_and_where_it_is_split_until_w():
    layers = nn.Sequential(CountedLayer(NO_TIME, 0.5), CountedLayer(NO_TIME, 0.25))
    meter = share_meter(layers)
    loss = layers(torch.ones(1, 8)).sum()
    assert meter.now == 0.75
    loss.backward()
    assert (meter.now, meter.peak) == (0, 0.75)

    queue = WeightGradQueue(limit=1)
    loss = queue.intercepting(layers)(torch.ones(1, 8)).sum()
    with queue.deferring(0, 0):
        loss.backward()
    del loss
    assert meter.now == 0.75
    queue.release(0, 0)
    assert meter.now == 0


def test_dropped_layers_count_from_their_recompute():
    layers = nn.ModuleList([CountedLayer(NO_TIME, 0.5), CountedLayer(NO_TIME, 0.25)])
    meter = share_meter(layers)
    regions = MicrobatchRegions()
    loss = layers[1](DroppedLayer(layers[0], regions)(torch.ones(1, 8))).sum()
    assert meter.now == 0.25
    regions.recompute()
    assert meter.now == 0.75
    with regions.backward():
        loss.backward()
    assert meter.now == 0


@pytest.mark.dist
def test_all_contestants_run_and_hold_what_the_simulator_says():
    command = [sys.executable, str(SCRIPT), "--stages", "3", "--micro-batches", "4", "--forward-ms", "2"]
    command += ["--layers-per-stage", "3", "--budget", "1.5", "--search-seconds", "0.3", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ})
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert all("error" not in row for row in rows.values()), rows
    counted = {name: row for name, row in rows.items() if name.endswith(": activations")}
    assert {"1.5 A: auto: activations", "1.5 A: 1f1b: activations"} <= set(counted)
    for name, row in counted.items():
        assert row["measured"] <= row["reference"] * (1 + 1e-6), name
        assert len(row["by_rank"]) == 3
        if row["budget"] is not None:
            assert row["measured"] <= row["budget"]
