"""The shell scripts, as far as they go without making an environment."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "run_scripts"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_bash_can_read_it(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("number", ["0", "two", "", "-1"])
def test_a_wrong_number_of_ranks_is_refused_at_once(number):
    result = subprocess.run(
        ["bash", SCRIPTS / "pretrain_gpt.sh"],
        env={"PATH": "/usr/bin:/bin", "NUM_RANKS": number or "x"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 3
    assert "whole number above 0" in result.stderr


def test_an_old_python_is_refused_before_anything_is_made(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    script = tmp_path / "run_scripts" / "script.sh"
    script.parent.mkdir()
    (script.parent / "setup_env.sh").write_text((SCRIPTS / "setup_env.sh").read_text())
    (tmp_path / "setup.py").write_text("")
    script.write_text('. "$(dirname "$0")/setup_env.sh"; ensure_environment')
    result = subprocess.run(
        ["bash", script], env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert result.returncode == 3
    assert "Python 3.10 or newer" in result.stderr
    assert not (tmp_path / ".venv" / "bin").exists()
