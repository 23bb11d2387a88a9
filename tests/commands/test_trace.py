"""`python -m ext trace`: files, differences and pictures, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ext.__main__ import EXIT_BAD_CONFIG, main
from ext.pipeline.chrome import TraceFile, read_trace, trace_problems
from ext.pipeline.trace import Span, StepTrace

SCP = "--stages 4 --micro-batches 8 --schedule shifted_critical_path --p2p 0.1"


def call(capsys, *arguments: Any, code: int = 0) -> dict:
    """Run with --json; standard output is one JSON object whatever happens."""
    assert main(["trace", *map(str, arguments), "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def simulated(capsys, path: Path, options: str = SCP) -> Path:
    call(capsys, "simulate", *options.split(), "--output", path)
    return path


def measured(simulated_path: Path, path: Path, factor: float = 1.25) -> Path:
    """The simulated file as if a run had measured it: longer computation in the same time, two steps."""
    file = read_trace(simulated_path)

    def longer(span: Span) -> Span:
        return span._replace(start=span.end - span.duration / factor) if span.name == "F" else span

    rows = tuple(tuple(longer(span) for span in row if span.name != "idle") for row in file.steps[0].rows)
    later = tuple(tuple(s._replace(start=s.start + 1, end=s.end + 1) for s in row) for row in rows)
    TraceFile("measured", file.plan, (StepTrace(3, rows), StepTrace(4, later))).write(path)
    return path


def test_simulate_writes_a_valid_file(capsys, tmp_path):
    path = tmp_path / "sim.json"
    answer = call(capsys, "simulate", *SCP.split(), "--unit-ms", 20, "--output", path)
    assert trace_problems(json.loads(path.read_text())) == []
    trace = read_trace(path).steps[0]
    assert answer["output"] == str(path)
    assert answer["pipeline_time_ms"] == pytest.approx(trace.pipeline_time * 1e3)
    assert answer["bubble_share"] == pytest.approx(trace.bubble, abs=1e-6)
    assert main(["simulate", *SCP.split(), "--json"]) == 0
    assert answer["pipeline_time_ms"] == pytest.approx(20 * json.loads(capsys.readouterr().out)["step_time"])


def test_diff_of_two_files(capsys, tmp_path):
    sim = simulated(capsys, tmp_path / "sim.json")
    run = measured(sim, tmp_path / "run.json")
    answer = call(capsys, "diff", sim, run)
    predicted, found = read_trace(sim).steps[0], read_trace(run).steps[0]
    assert answer["same_orders"] is True
    assert answer["steps"] == [3, 4]
    assert [row["stage"] for row in answer["stages"]] == [0, 1, 2, 3]
    for row, expected, share in zip(answer["stages"], predicted.bubbles, found.bubbles, strict=True):
        assert row["predicted"] == pytest.approx(expected, abs=1e-6)
        assert row["measured"] == pytest.approx(share, abs=1e-6)
        assert row["difference"] == pytest.approx(share - expected, abs=1e-6)
        assert row["difference"] > 0.02
    assert answer["measured_bubble"] == pytest.approx(found.bubble, abs=1e-6)


def test_diff_of_a_measured_file_alone(capsys, tmp_path):
    sim = simulated(capsys, tmp_path / "sim.json")
    # A file that is as the simulator has it predicts itself.
    answer = call(capsys, "diff", measured(sim, tmp_path / "same.json", factor=1.0))
    assert answer["predicted_pipeline_time_ms"] == pytest.approx(answer["measured_pipeline_time_ms"], rel=1e-4)
    for row in answer["stages"]:
        assert row["difference"] == pytest.approx(0, abs=1e-4)
    answer = call(capsys, "diff", measured(sim, tmp_path / "run.json"))
    assert answer["predicted_pipeline_time_ms"] < 0.97 * answer["measured_pipeline_time_ms"]


def test_diff_for_people(capsys, tmp_path):
    sim = simulated(capsys, tmp_path / "sim.json")
    run = measured(sim, tmp_path / "run.json")
    other = simulated(capsys, tmp_path / "other.json", "--stages 4 --micro-batches 8 --schedule 1f1b")
    assert main(["trace", "diff", str(other), str(run)]) == 0
    out = capsys.readouterr().out
    assert "bubble predicted" in out
    assert "ms simulated" in out
    assert "the orders differ: predicted 1f1b (" in out
    assert call(capsys, "diff", other, run)["same_orders"] is False


@pytest.mark.parametrize("name", ["picture.png", "new/picture.svg", "picture.pdf"])
def test_draw(capsys, tmp_path, name):
    sim = simulated(capsys, tmp_path / "sim.json")
    run = measured(sim, tmp_path / "run.json")
    output = tmp_path / name
    assert main(["trace", "draw", str(sim), str(run), "--output", str(output)]) == 0
    start = output.read_bytes()[:300]
    assert start.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[output.suffix[1:]])
    assert main(["trace", "draw", str(run), "--step", "3", "--output", str(output)]) == 0


def error(capsys, *arguments: Any) -> str:
    assert main(["trace", *map(str, arguments)]) == EXIT_BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_draw_without_matplotlib(capsys, tmp_path, monkeypatch):
    sim = simulated(capsys, tmp_path / "sim.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = error(capsys, "draw", sim, "--output", tmp_path / "x.png")
    assert "pip install 'megatron-deepspeed-ext[plot]'" in text


def test_what_cannot_be_drawn(capsys, tmp_path):
    sim = simulated(capsys, tmp_path / "sim.json")
    assert "end the name in .png, .svg, .pdf" in error(capsys, "draw", sim, "--output", "x.gif")
    assert "found 7; the simulated file has 0" in error(capsys, "draw", sim, "--output", "x.png", "--step", 7)
    (tmp_path / "file").touch()
    assert "cannot be written" in error(capsys, "draw", sim, "--output", tmp_path / "file" / "x.png")


def test_what_cannot_be_compared(capsys, tmp_path):
    sim = simulated(capsys, tmp_path / "sim.json")
    small = simulated(capsys, tmp_path / "small.json", "--stages 2 --micro-batches 8 --schedule 1f1b")
    assert "has 2 stages on 2 ranks" in error(capsys, "diff", small, sim)
    assert "found 3" in error(capsys, "diff", sim, sim, sim)
    assert "Missing argument" in error(capsys, "diff")
    answer = call(capsys, "diff", tmp_path / "absent.json", code=EXIT_BAD_CONFIG)
    assert "cannot be read" in answer["error"]


def test_what_cannot_be_simulated(capsys, tmp_path):
    output = ["--output", tmp_path / "x.json"]
    unknown, empty = SCP.replace("shifted_critical_path", "x"), SCP.replace("--stages 4", "--stages 0")
    assert "unknown schedule" in error(capsys, "simulate", *output, *unknown.split())
    assert "--stages" in error(capsys, "simulate", *output, *empty.split())
    assert "--unit-ms: found 0.0" in error(capsys, "simulate", *output, *SCP.split(), "--unit-ms", 0)
    assert "No such option: --stage" in error(capsys, "simulate", *output, "--stage", 3)
    assert "--stages: missing" in error(capsys, "simulate", *output)
    (tmp_path / "file").touch()
    text = error(capsys, "simulate", "--output", tmp_path / "file" / "x.json", *SCP.split())
    assert "cannot be written" in text
    assert not (tmp_path / "x.json").exists()
