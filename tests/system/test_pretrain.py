"""The example job under the real launcher: preprocess, train, stop by a signal, resume without a difference."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ext.testing.ranks import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "run_scripts"
NUM_STEPS = 30
SMALL = "--num-layers 4 --hidden-size 32 --num-heads 2 --seq-length 32 --dropout 0.1 --warmup-steps 5 --log-every 1"
RHYTHM = f"--steps {NUM_STEPS} --eval-every 10 --eval-batches 4 --save-every 10"

pytestmark = [pytest.mark.system, pytest.mark.dist]


def _launch(folder, *options):
    command = [
        Path(sys.executable).parent / "deepspeed",
        *("--log_level", "error", "--num_accelerators", "2", "--master_port", str(free_port())),
        SCRIPTS / "pretrain_gpt.py",
        *SMALL.split(),
        *RHYTHM.split(),
        *map(str, options),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _log(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _by_step(path):
    return {line["step"]: (line["loss"], line["validation_loss"], line["learning_rate"]) for line in _log(path)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "own"
    subprocess.run(
        [sys.executable, SCRIPTS / "preprocess_data.py", "--input", SCRIPTS, "--output-prefix", prefix],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return prefix


@pytest.mark.timeout(600)
def test_a_stopped_run_resumes_as_if_it_had_not_been_stopped(data, tmp_path):
    """The whole run reads the pair of files, the stopped one the text that it was made of: nothing may differ."""
    whole = _launch(tmp_path, "--data-path", data, "--output", "whole", "--log-json", "whole.jsonl")
    text, _ = whole.communicate(timeout=180)
    assert whole.returncode == 0, text
    assert text.count("megatron-deepspeed-ext ") == 1
    assert "Traceback" not in text
    assert "Warning" not in text
    losses = _by_step(tmp_path / "whole.jsonl")
    assert sorted(losses) == list(range(1, NUM_STEPS + 1))
    assert losses[NUM_STEPS][1] < losses[10][1] < 5.4

    stopped = _launch(tmp_path, "--data-path", SCRIPTS, "--output", "runs/one", "--log-json", "stopped.jsonl")
    while len(_log(tmp_path / "stopped.jsonl")) < 3 and stopped.poll() is None:
        time.sleep(0.02)
    for launcher in psutil.Process(stopped.pid).children():
        launcher.send_signal(signal.SIGTERM)
    text, _ = stopped.communicate(timeout=180)
    assert "stopped by SIGTERM; go on with --resume runs/one" in text
    assert "Traceback" not in text
    last = max(_by_step(tmp_path / "stopped.jsonl"))
    assert last < NUM_STEPS, "it was too fast to be stopped"

    resumed = _launch(tmp_path, "--data-path", SCRIPTS, "--resume", "--log-json", "stopped.jsonl")
    text, _ = resumed.communicate(timeout=180)
    assert resumed.returncode == 0, text
    assert f"going on after step {last} from runs/one" in text
    assert len(_log(tmp_path / "stopped.jsonl")) == NUM_STEPS
    assert _by_step(tmp_path / "stopped.jsonl") == losses
    assert (tmp_path / "runs/one/ext_resolved_config.json").exists()
