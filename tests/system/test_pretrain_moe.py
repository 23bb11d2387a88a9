"""The example job with experts, two stages of two ranks: it learns, and a resumed run sees the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ext.testing.ranks import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "run_scripts"
JOB = (
    f"--config {SCRIPTS}/configs/gpt_moe_ep2.json --pipeline-stages 2 --num-experts 8 --top-k 2 --num-layers 2 "
    f"--hidden-size 32 --num-heads 2 --seq-length 32 --dropout 0.1 --warmup-steps 2 --log-every 1 --eval-every 0 "
    f"--save-every 6 --data-path {Path(json.__file__).parent}"
)

pytestmark = [pytest.mark.system, pytest.mark.dist, pytest.mark.slow]


def _run(folder: Path, *options: str) -> tuple[str, dict[int, float]]:
    command = [
        Path(sys.executable).parent / "deepspeed",
        *("--log_level", "error", "--num_accelerators", "4", "--master_port", str(free_port())),
        SCRIPTS / "pretrain_gpt.py",
        *JOB.split(),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return done.stdout + done.stderr, {line["step"]: line["loss"] for line in lines}


@pytest.mark.timeout(600)
def test_it_learns_and_resumes(tmp_path):
    text, losses = _run(tmp_path, "--steps", "12", "--output", "whole", "--log-json", "log.jsonl")
    assert text.count("megatron-deepspeed-ext ") == 1
    assert "MoE dispatcher auto" in text
    assert "Traceback" not in text
    assert losses[12] < losses[1] - 0.5
    latest = tmp_path / "whole" / "checkpoints" / "latest"
    latest.write_text("step_00000006")
    (tmp_path / "log.jsonl").unlink()
    text, again = _run(tmp_path, "--steps", "12", "--resume", "whole", "--log-json", "log.jsonl")
    assert "going on after step 6 from whole" in text
    assert again == {step: loss for step, loss in losses.items() if step > 6}
