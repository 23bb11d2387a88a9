"""The trace key and the report of an engine, on emulated accelerators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

import ext
from ext.adapters.deepspeed.report import measure
from ext.adapters.deepspeed.tracing import Tracer
from ext.core.errors import ConfigError
from ext.pipeline.chrome import read_trace, trace_problems
from ext.testing.emulated import EmulatedLayer, EmulatedTimes, mean_loss
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

NUM_STAGES, M = 4, 6
TIMES = EmulatedTimes(forward=0.002, input_grad=0.003, weight_grad=0.001, recompute=0.004)


def _engine(num_stages: int, schedule: str, **block: Any) -> Any:
    module = PipelineModule(
        layers=[LayerSpec(EmulatedLayer, TIMES.scaled(0.5)) for _ in range(2 * num_stages)],
        num_stages=num_stages,
        loss_fn=mean_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": M,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": {"pipeline": {"schedule": schedule}, **block},
    }
    return ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def _data() -> Any:
    return iter([(torch.ones(1, 8), torch.zeros(1)) for _ in range(M)])


def _run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {}
    for name in ("shifted_critical_path", "zb_h1"):
        engine = _engine(world_size, name, trace={"path": f"{folder}/{name}/trace.json", "steps": [1, 2]})
        assert measure(engine) is None
        for _ in range(4):
            engine.train_batch(_data())
            engine.eval_batch(_data())
        found[name] = measure(engine)
        found[name, "plan"] = engine.plan
        assert [step.step for step in engine.recorder.recorded()] == [0, 1, 2, 3]
    engine = _engine(world_size, "1f1b")
    engine.recorder.enabled = False
    engine.train_batch(_data())
    assert measure(engine) is None
    engine.recorder.enabled = True
    engine.train_batch(_data())
    found["one step"] = measure(engine)
    engine = _engine(world_size, "1f1b", trace={"path": f"{folder}/growing.json", "steps": [0, 9]})
    written = []
    for step in range(6):
        if step == 5:
            engine.set_train_batch_size(engine.train_batch_size() - engine.dp_world_size)  # another plan
        engine.train_batch(_data())
        if rank == 0:
            written.append([trace.step for trace in read_trace(Path(folder) / "growing.json").steps])
    found["written"] = written
    (Path(folder) / "file").touch()
    for path in (f"{folder}/file/trace.json", folder):
        with pytest.raises(ConfigError, match="ext.trace.path: .* cannot be written: .* Name another file"):
            _engine(world_size, "1f1b", trace={"path": path})
    config = {"train_batch_size": 1, "ext": {"trace": {"path": "t.json"}}}
    with pytest.raises(ConfigError, match="ext.trace: needs a pipeline model"):
        ext.initialize(model=torch.nn.Linear(2, 2), config=config)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("traces")
    return folder, run_ranks(_run, NUM_STAGES, str(folder), timeout=120)


def test_a_growing_file_is_written_whenever_it_has_doubled_and_starts_again_with_another_plan(runs):
    _, found = runs
    assert found[0]["written"] == [[0], [0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [5]]


@pytest.mark.parametrize("name", ["shifted_critical_path", "zb_h1"])
def test_trace_file_of_a_run(runs, name):
    folder, found = runs
    path = folder / name / "trace.json"
    assert trace_problems(json.loads(path.read_text())) == []
    trace_file = read_trace(path)
    plan = found[0][name, "plan"]
    assert (trace_file.source, trace_file.plan) == ("measured", plan)
    assert [trace.step for trace in trace_file.steps] == [1, 2]
    for trace in trace_file.steps:
        for rank, row in enumerate(trace.rows):
            ran = [(s.stage, s.name, s.microbatch) for s in sorted(row, key=lambda s: s.end) if s.is_compute]
            assert ran == [(a.stage, a.kind.value, a.microbatch) for a in plan.compute_order(rank)]
            names = [span.name for span in row]
            assert {"idle", "OPTIMIZER"} <= set(names)
            assert names.count("LOAD") == (M if rank in (0, NUM_STAGES - 1) else 0)
            assert names.count("SEND_F") == (M if rank < NUM_STAGES - 1 else 0)
            assert names.count("SEND_B") == (M if rank > 0 else 0)
            # Each of the two layers of a stage is run again by itself where no R of its own does it.
            num_inline = sum(span.inline for span in row)
            num_early = sum(stage == rank for stage, _ in plan.early_recomputes)
            assert num_inline == (2 * (M - num_early) if plan.recomputed_layers[rank] else 0)
    times = [trace.start for trace in trace_file.steps]
    assert times == sorted(times)


def test_report_holds_the_times_of_every_stage(runs):
    _, found = runs
    # What an emulated device does for an action may begin while its host still comes from the one before.
    forward, input_grad, weight_grad, rerun = (
        0.7 * seconds for seconds in (TIMES.forward, TIMES.input_grad, TIMES.weight_grad, TIMES.rerun)
    )
    for name in ("shifted_critical_path", "zb_h1"):
        report = found[0][name]
        assert all(of_rank[name] == report for of_rank in found)
        assert report.num_steps == 3
        for stage, of_stage in enumerate(report.stages):
            times = of_stage.times
            assert times.forward >= forward
            if name == "zb_h1":
                assert (times.backward, times.recompute) == (0, 0)
                assert times.input_grad >= input_grad
                assert times.weight_grad >= weight_grad
            else:
                assert times.backward >= input_grad + weight_grad
                assert (times.recompute >= rerun) == (stage < NUM_STAGES - 1)
            assert 0 < of_stage.bubble < 1
            assert 0 < of_stage.simulated_bubble < 1
        assert report.step_time_s > report.pipeline_time_s > M * (forward + input_grad + weight_grad)
        assert report.simulated_step_time_s - report.simulated_pipeline_time_s == pytest.approx(
            report.step_time_s - report.pipeline_time_s
        )
        assert report.bubble == pytest.approx(sum(stage.bubble for stage in report.stages) / NUM_STAGES)
        assert report.hand_over_s > 0
    assert found[0]["one step"].num_steps == 1


def test_a_run_without_any_of_the_chosen_steps_says_so(tmp_path, caplog):
    tracer = Tracer(tmp_path / "trace.json", 3, 5)
    tracer.finish()
    assert "no step from 3 to 5 was made" in caplog.text
    assert not (tmp_path / "trace.json").exists()
