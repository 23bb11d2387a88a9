"""The example job under the real launcher with layers shared by two ranks: the losses of one, and an exact resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ext.testing.ranks import free_port

ROOT = Path(__file__).parents[2]
SIZE = "--pipeline-stages 1 --num-layers 2 --hidden-size 32 --num-heads 2 --seq-length 32 --warmup-steps 2"
RHYTHM = "--steps 6 --log-every 1 --eval-every 3 --eval-batches 2 --save-every 3"

pytestmark = [pytest.mark.system, pytest.mark.dist, pytest.mark.slow]


def _losses(folder, ranks, *options):
    """Losses by step; the job runs in ``folder``."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    command = [
        Path(sys.executable).parent / "deepspeed",
        *("--log_level", "error", "--num_accelerators", str(ranks), "--master_port", str(free_port())),
        ROOT / "run_scripts" / "pretrain_gpt.py",
        *SIZE.split(),
        *RHYTHM.split(),
        *("--tensor-parallel", str(ranks), "--data-path", ROOT / "run_scripts", "--log-json", log),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {line["step"]: line["loss"] for line in map(json.loads, log.read_text().splitlines())}


@pytest.mark.timeout(600)
def test_two_ranks_train_as_one_and_resume_exactly(tmp_path):
    alone = _losses(tmp_path, 1, "--output", "alone")
    shared = _losses(tmp_path, 2, "--output", "shared")
    assert sorted(shared) == sorted(alone) == list(range(1, 7))
    assert all(shared[step] == pytest.approx(alone[step], rel=1e-5) for step in alone)

    whole = _losses(tmp_path, 2, "--output", "run", "--dropout", "0.1")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000003")
    again = _losses(tmp_path, 2, "--resume", "run", "--dropout", "0.1")
    assert again == {step: loss for step, loss in whole.items() if step > 3}
