"""Trace files: the Trace Event Format, what this package adds, and every way to be wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ext.core.errors import DataError
from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.chrome import TraceFile, read_trace, trace_problems
from ext.pipeline.costs import Costs
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.pipeline.trace import StepTrace, simulated_trace


def trace_file(
    name: str = "shifted_critical_path", p: int = 4, m: int = 8, num_steps: int = 1, latency: float = 0.0
) -> TraceFile:
    cls, shape, layers = SCHEDULES.get(name), PipelineShape(p, m), (2,) * p
    recomputed = default_recompute(cls(shape=shape), layers)
    costs = Costs(stage_costs(LayerCosts(0.5, 0.6, 0.4, 0.5, 1.0), layers, recomputed), latency=latency)
    simulation = simulate(build_plan(cls(shape=shape), layers_per_stage=layers, recomputed_layers=recomputed), costs)
    step = simulated_trace(simulation, 0.001)
    steps = [
        StepTrace(k, tuple(tuple(s._replace(start=s.start + k, end=s.end + k) for s in row) for row in step.rows))
        for k in range(num_steps)
    ]
    return TraceFile("simulated", simulation.plan, tuple(steps))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES.get(name).has_rule])
def test_written_and_read_again(tmp_path, name):
    written = trace_file(name, num_steps=2)
    path = tmp_path / "new" / "trace.json"
    written.write(path)
    read = read_trace(path)
    assert (read.source, read.plan) == (written.source, written.plan)
    assert [trace.step for trace in read.steps] == [0, 1]
    for before, after in zip(written.steps, read.steps, strict=True):
        assert after.bubbles == pytest.approx(before.bubbles, abs=1e-5)
        for row, again in zip(before.rows, after.rows, strict=True):
            key = [(s.name, s.stage, s.microbatch, s.inline) for s in row]
            assert sorted(key) == sorted((s.name, s.stage, s.microbatch, s.inline) for s in again)
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]


def test_one_row_per_stage_with_everything_by_name():
    content = trace_file(latency=0.1).to_json()
    rows = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {0: "stage 0", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
    spans = [e for e in content["traceEvents"] if e["ph"] == "X"]
    for rank in range(3):
        assert {e["name"] for e in spans if e["tid"] == rank} >= {"F", "B", "R", "RECV_B", "idle"}
    for name in "FB":
        of_stage = sorted(e["args"]["microbatch"] for e in spans if e["name"] == name and e["tid"] == 1)
        assert of_stage == list(range(8))
    inline = [e for e in spans if e["args"].get("inline")]
    assert inline
    assert {e["name"] for e in inline} == {"R"}
    assert {e["cat"] for e in spans} == {"compute", "recompute", "communication", "idle"}


def _changed(change: Any) -> list[str]:
    content = json.loads(json.dumps(trace_file().to_json()))
    assert trace_problems(content) == []
    change(content)
    return trace_problems(content)


def _first(content: Any, name: str = "F") -> dict[str, Any]:
    return next(e for e in content["traceEvents"] if e["name"] == name)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: c.pop("traceEvents"), "a list 'traceEvents'"),
        (lambda c: c["traceEvents"].append(3), "found 3"),
        (lambda c: c["traceEvents"].append({"ph": "B"}), "'ph' of 'X' or 'M'"),
        (lambda c: _first(c).pop("ts"), ".ts: found None"),
        (lambda c: _first(c).update(ts="now"), ".ts: found now"),
        (lambda c: _first(c).update(dur=-1.0), ".dur: found -1.0"),
        (lambda c: _first(c).update(dur=float("nan")), ".dur: found nan"),
        (lambda c: _first(c).update(tid=True), ".tid: found True"),
        (lambda c: _first(c).update(name="forward"), "unknown name"),
        (lambda c: _first(c)["args"].pop("microbatch"), "args.microbatch: found None"),
        (lambda c: _first(c)["args"].update(microbatch=8), "args.microbatch: found 8; expected a whole number below 8"),
        (lambda c: _first(c)["args"].update(stage=4), "args.stage: found 4"),
        (lambda c: _first(c)["args"].update(step=-1), "args.step: found -1"),
        (lambda c: _first(c).update(tid=2), "stage 0 is on rank 0, found in row 2"),
        (lambda c: _first(c).update(dur=1500.0), "overlaps"),
        (lambda c: c["traceEvents"].remove(_first(c, "thread_name")), "names rows [1, 2, 3]"),
        (lambda c: c.pop("otherData"), "otherData: does not describe a plan"),
        (lambda c: c["otherData"].update(orders="rank 0: 0X0"), "'0X0' is no action"),
        (lambda c: c["otherData"].update(plan_hash="0"), "plan_hash is '0'"),
        (lambda c: c["otherData"].update(source="guessed"), "source is 'guessed'"),
        (lambda c: c.update(traceEvents=[e for e in c["traceEvents"] if e["ph"] == "M"]), "there is no span"),
    ],
)
def test_what_is_wrong_is_said(change, problem):
    found = _changed(change)
    assert any(problem in text for text in found), found


def test_junk_is_never_more_than_a_list_of_problems():
    content = json.loads(json.dumps(trace_file(p=2, m=4).to_json()))
    junk = [None, -1, 10**30, "x", [], {}, True, 1.5, float("nan")]
    targets = [(content, key) for key in content]
    targets += [(content["otherData"], key) for key in content["otherData"]]
    targets += [(event, key) for event in content["traceEvents"][:20] for key in event]
    targets += [(event["args"], key) for event in content["traceEvents"][:20] for key in event["args"]]
    for owner, key in targets:
        kept = copy.copy(owner[key])
        for value in junk:
            owner[key] = value
            assert isinstance(trace_problems(content), list)
        owner[key] = kept
    assert trace_problems(content) == []


def test_files_that_are_no_traces(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent.json")
    (tmp_path / "text").write_text("no json")
    with pytest.raises(DataError, match="is no JSON"):
        read_trace(tmp_path / "text")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(DataError, match="no trace of this package"):
        read_trace(tmp_path / "list")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is no JSON"):
        read_trace(tmp_path / "bytes")
