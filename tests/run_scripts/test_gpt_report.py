"""Progress lines, JSON log, monitor events and the table at the end."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ext.core.errors import ConfigError
from gpt.report import JsonLog, Progress, Summary, duration, median

PROGRESS = Progress(
    step=20,
    loss=3.25,
    validation_loss=None,
    tokens_per_s=12345.6,
    learning_rate=0.001,
    step_time_s=0.5,
    bubble=0.25,
    memory_gib=(1.5, 2.0),
    plan_hash="0123456789ab",
)


def test_line_has_step_loss_speed_and_time_left():
    assert PROGRESS.line(1000, 3700) == "step   20/1000  loss 3.2500  12,346 tokens/s  ETA 1h01m"
    assert "validation loss 3.5000" in replace(PROGRESS, validation_loss=3.5).line(1000, 0)


def test_log_is_one_object_per_line_and_goes_on_after_a_resume(tmp_path):
    for step in (1, 2):
        with JsonLog(tmp_path / "log.jsonl") as log:
            log.write(replace(PROGRESS, step=step))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["memory_gib"] == [1.5, 2.0]
    assert lines[0]["plan_hash"] == "0123456789ab"


def test_log_refuses_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="--log-json"):
        JsonLog(tmp_path / "none" / "log.jsonl")


def test_monitor_gets_numbers_that_a_float32_holds():
    events = {name.removeprefix("Train/Samples/"): value for name, value, samples in PROGRESS.events(640)}
    assert events["plan_hash"] == 0x012345 < 2**24
    assert events["memory_gib_stage_1"] == 2.0
    assert events["bubble"] == 0.25
    assert "bubble" not in {name for name, *_ in replace(PROGRESS, bubble=None).events(640)}


def test_summary_shows_all_it_is_given_on_a_narrow_terminal():
    summary = Summary(
        num_steps=300,
        schedule="1f1b",
        plan_hash="abc",
        losses=[(1, 5.5), (300, 2.25)],
        validation_losses=[],
        tokens_per_s=1000.0,
        step_time_s=0.5,
        simulated_step_time_s=0.48,
        bubble=0.2,
        simulated_bubble=None,
        memory_gib=(1.0, 1.25),
        memory_kind="resident memory",
        live_bytes=[(3 * 2**20, 2**21), (None, 2**21)],
        recomputed=["stage 0: 3 MiB saved"],
        checkpoint=Path("/very/long" * 10),
        resolved_config=Path("run/resolved.json"),
    )
    out = io.StringIO()
    summary.show(Console(file=out, width=70))
    text = out.getvalue()
    for part in (
        "300 steps under 1f1b",
        "5.5000 (step 1)",
        "0.500 s / 0.480 s",
        "20.0% / -",
        "1.00, 1.25 GiB",
        "3.0 / 2.0,",
        "stage 0: 3 MiB saved",
    ):
        assert part in text
    assert str(summary.checkpoint) in text.replace(" ", "").replace("\u2502\n\u2502\u2502", "")


def test_duration_and_median():
    assert [duration(s) for s in (0.4, 59.6, 187, 7500)] == ["0s", "1m00s", "3m07s", "2h05m"]
    assert median([]) is None
    assert median([3.0, 1.0, 2.0]) == 2.0
