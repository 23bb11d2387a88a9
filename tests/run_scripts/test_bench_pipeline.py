"""The pipeline benchmark: every contestant runs, rows keep their contract, failures are rows too."""

from __future__ import annotations

import json
from typing import Any

import pytest

import bench_pipeline
from emulated_network import NoEmulatedNetwork
from ext.core.errors import ConfigError
from pipeline_bench.race import race
from pipeline_bench.setting import DUALPIPEV, OURS, STOCK, TORCH, Contestant, Setting, simulated_seconds

SETTING = Setting(4, 8, forward=0.001, input_grad=0.001, weight_grad=0.001, recompute=0.001)
EXPECTED_MS = {
    ("1f1b", OURS, "none"): 33,
    ("1f1b", OURS, "full"): 44,
    ("shifted_critical_path", OURS, "default"): 38,
    ("zb_h1", OURS, "default"): 27,
    ("1f1b", STOCK, "full"): 44,
    ("Schedule1F1B", TORCH, "none"): 33,
    ("ScheduleInterleaved1F1B", TORCH, "none"): 28.5,
    ("ScheduleZBVZeroBubble", TORCH, "none"): 25.5,
    ("DualPipeV", DUALPIPEV, "none"): 29.5,
}
"""By schedule, whose it is, and recompute: step time of 4 stages and 8 micro-batches at one millisecond per part."""


@pytest.mark.dist
def test_all_run_and_are_simulated_and_one_that_fails_says_why():
    contestants = [Contestant(f"{kind} {name} {again}", kind, name, again) for name, kind, again in EXPECTED_MS]
    broken = Contestant("broken", TORCH, "ScheduleOfNobody")
    outcomes = race(SETTING, [*contestants[:1], broken, *contestants[1:]], num_rounds=2)
    for contestant, expected in zip(contestants, EXPECTED_MS.values(), strict=True):
        outcome = outcomes[contestant.name]
        assert outcome.error is None, outcome.error
        assert outcome.plan is not None
        assert simulated_seconds(outcome.plan, contestant, SETTING) * 1e3 == pytest.approx(expected)
        assert len(outcome.seconds) == 2
        # Layers never end before their deadline, so no step beats the simulation.
        assert min(outcome.seconds) * 1e3 >= expected
    assert outcomes["broken"].plan is None
    assert "ScheduleOfNobody" in outcomes["broken"].error


@pytest.mark.dist
def test_rows_of_the_json_output(capsys):
    bench_pipeline.main(
        stages=2, micro_batches=4, forward_ms=1, rounds=1, schedule=["shifted_critical_path", "1f1b"], peers=False,
        as_json=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows)
    for row in rows:
        assert set(row) == {"name", "measured", "reference", "ratio", "unit", "command", "load"}
        assert row["ratio"] == pytest.approx(row["measured"] / row["reference"], abs=1e-3)
    assert by_name["shifted_critical_path"]["unit"] == "ms"
    faster = by_name["speed-up of shifted_critical_path over 1f1b, full recompute"]
    assert (faster["unit"], faster["reference"]) == ("x", round(20 / 16, 4))
    assert "speed-up of 1f1b over stock DeepSpeed" in by_name


def test_a_failed_contestant_is_a_row(capsys, monkeypatch):
    error = bench_pipeline.Outcome(None, (), "rank 1: RuntimeError: not on gloo")
    monkeypatch.setattr(
        bench_pipeline, "race", lambda setting, contestants, *args, **kwargs: {c.name: error for c in contestants}
    )
    bench_pipeline.main(as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["error"] for row in rows} == {error.error}
    assert all(row["measured"] is None for row in rows)
    bench_pipeline.main()
    assert "failed: rank 1: RuntimeError: not on gloo" in capsys.readouterr().out


def test_what_cannot_be_measured(monkeypatch):
    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise NoEmulatedNetwork("ip is not installed.")

    monkeypatch.setattr("pipeline_bench.race.emulated_network", no_network)
    with pytest.raises(ConfigError, match="--delay-ms: ip is not installed. Leave it out"):
        bench_pipeline.main(delay_ms=10)
    with pytest.raises(ConfigError, match="shifted_critical_path: needs --micro-batches 4"):
        bench_pipeline.main(micro_batches=2, schedule=["shifted_critical_path"])
    with pytest.raises(ConfigError, match="unknown schedule 'x'"):
        bench_pipeline.main(schedule=["x"])


def test_a_machine_without_the_tools_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--delay-ms: .* is not installed"):
        bench_pipeline.main(delay_ms=10)
