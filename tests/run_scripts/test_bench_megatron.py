"""The Megatron benchmark: everybody runs the order that is simulated, and rows keep their contract."""

from __future__ import annotations

import json

import pytest

import bench_megatron
from ext.core.errors import ConfigError
from pipeline_bench.race import MEGATRON, race
from pipeline_bench.setting import OURS, STOCK, Contestant, Setting, simulated_seconds

SETTING = Setting(2, 4, forward=0.002, input_grad=0.002, weight_grad=0.002, recompute=0.002, layers_per_rank=2)
EXPECTED_MS = {
    ("1f1b", STOCK, "none"): 30,
    ("1f1b", STOCK, "full"): 40,
    ("1f1b", OURS, "none"): 30,
    ("1f1b", OURS, "full"): 40,
    ("shifted_critical_path", OURS, "default"): 32,
    ("zb_h1", OURS, "none"): 26,
}
"""By schedule, whose it is, and recompute: step time of 2 stages and 4 micro-batches at two milliseconds per part."""


@pytest.mark.dist
def test_all_run_what_is_simulated():
    contestants = [Contestant(f"{kind} {name} {again}", kind, name, again) for name, kind, again in EXPECTED_MS]
    outcomes = race(SETTING, contestants, num_rounds=1, host=MEGATRON)
    for contestant, expected in zip(contestants, EXPECTED_MS.values(), strict=True):
        outcome = outcomes[contestant.name]
        assert outcome.error is None, outcome.error
        assert outcome.plan is not None
        assert simulated_seconds(outcome.plan, contestant, SETTING) * 1e3 == pytest.approx(expected)
        # Layers never end before their deadline, so no step beats the simulation.
        assert outcome.seconds[0] * 1e3 >= expected


@pytest.mark.slow
@pytest.mark.dist
def test_rows_of_the_json_output(capsys):
    bench_megatron.main(stages=2, micro_batches=4, forward_ms=1, rounds=1, schedule=["1f1b", "auto"], as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    for row in rows:
        assert set(row) == {"name", "measured", "reference", "ratio", "unit", "command", "load"}
        assert row["ratio"] == pytest.approx(row["measured"] / row["reference"], abs=1e-3)
    assert by_name["speed-up of 1f1b over Megatron's 1F1B"]["reference"] == 1.0
    # The search knows no better order than these two of the same length for nothing recomputed.
    assert by_name["auto, nothing recomputed"]["reference"] <= by_name["1f1b"]["reference"]
    assert by_name["auto within 2 A"]["unit"] == "ms"


def test_schedules_that_cannot_run_are_refused():
    with pytest.raises(ConfigError, match="--schedule shifted_critical_path: needs --micro-batches 4 or more"):
        bench_megatron.main(micro_batches=2, schedule=["shifted_critical_path"])
