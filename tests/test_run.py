"""ext.run refuses before the script starts, passes arguments on, and leaves the script's own errors alone."""

import sys

import pytest

import patches
from ext import run


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script that writes what it was called with; the process is left as it was."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, deepspeed\n"
        "from pathlib import Path\n"
        f"called = Path({str(tmp_path / 'called')!r})\n"
        "called.write_text(' '.join([deepspeed.initialize.__module__, *sys.argv[1:]]))\n"
        "if 'fail' in sys.argv: raise KeyError('of the script')\n"
    )
    yield path
    patches.undo("deepspeed_initialize")


def test_the_script_gets_its_arguments_and_our_initialize(script, tmp_path):
    assert run.main(["--local_rank=1", str(script), "--steps", "3"]) == 0
    assert (tmp_path / "called").read_text() == "ext.adapters.deepspeed.initialize --local_rank=1 --steps 3"


def test_an_error_of_the_script_is_its_own(script):
    with pytest.raises(KeyError, match="of the script"):
        run.main([str(script), "fail"])


@pytest.mark.parametrize("form", ["--deepspeed_config {}", "--deepspeed_config={}"])
def test_a_bad_config_stops_it_before_the_script(script, tmp_path, capsys, form):
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "ext": {"pipelin": {}, "recompute": {"polcy": "full"}}}')
    assert run.main([str(script), *form.format(config).split()]) == 3
    text = capsys.readouterr().err
    assert text.startswith("ConfigError: ")
    assert "Did you mean 'pipeline'?" in text
    assert "Did you mean 'policy'?" in text
    assert "Traceback" not in text
    assert not (tmp_path / "called").exists()


def test_world_size_one_under_mpirun(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr("ext.core.launch_env.find_spec", lambda name: None)
    assert run.main([str(script)]) == 3
    text = capsys.readouterr().err
    assert "RANK and WORLD_SIZE are not set" in text
    assert not (tmp_path / "called").exists()


def test_no_script(capsys, tmp_path):
    assert run.main([]) == 3
    assert "no training script given" in capsys.readouterr().err
    assert run.main([str(tmp_path / "none.py")]) == 3
    assert "none.py' does not exist" in capsys.readouterr().err
