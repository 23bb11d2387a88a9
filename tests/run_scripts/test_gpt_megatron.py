"""pretrain_gpt.py for Megatron: when it is meant, and what is said where no checkout fits."""

import pytest

from ext.commands import checkout as checkouts
from ext.core.errors import ConfigError
from gpt import megatron


def _checkout(folder, version="0.16.1"):
    (folder / "megatron" / "training").mkdir(parents=True)
    (folder / "megatron" / "core").mkdir()
    major, minor, patch = version.split(".")
    (folder / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
    )
    (folder / "pretrain_gpt.py").touch()
    return folder


@pytest.fixture
def launched(monkeypatch):
    """What the launcher would have run."""
    calls = []
    monkeypatch.setattr(megatron.launch, "run", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(checkouts, "installed_version", lambda name: "0.16.1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "MEGATRON_LM"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_when_it_is_meant():
    assert megatron.is_asked(["--megatron", "x", "--", "--num-layers", "4"])
    assert megatron.is_asked(["--megatron=x"])
    assert megatron.is_asked(["--", "--num-layers", "4"])
    assert not megatron.is_asked(["--config", "x.json", "--steps", "3"])


def test_options_behind_the_separator_are_passed_on(launched, tmp_path):
    folder = _checkout(tmp_path)
    megatron.run(["--cpu", f"--megatron={folder}", "--", "--num-layers", "4", "--ext-pipeline-schedule", "gpipe"])
    (((script, options), kwargs),) = launched
    assert script == folder / "pretrain_gpt.py"
    assert options == ["--num-layers", "4", "--ext-pipeline-schedule", "gpipe"]
    assert kwargs == {"checkout": folder, "cpu": True}


def test_the_checkout_of_the_environment(launched, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_LM", str(_checkout(tmp_path)))
    megatron.run(["--"])
    assert launched[0][1] == {"checkout": tmp_path, "cpu": False}


def test_only_the_wheel(launched):
    with pytest.raises(ConfigError) as error:
        megatron.run(["--", "--num-layers", "4"])
    text = str(error.value)
    assert "megatron-core 0.16.1 has no training code" in text
    assert "git clone --branch core_v0.16.1" in text
    assert "export MEGATRON_LM=<its folder> or pass --megatron <its folder>" in text


def test_no_megatron_at_all(launched, monkeypatch):
    monkeypatch.setattr(checkouts, "installed_version", lambda name: None)
    with pytest.raises(ConfigError, match="megatron-core is not installed. Run: pip install 'megatron-core>=0.16.1'"):
        megatron.run(["--"])


def test_another_folder(launched, tmp_path):
    with pytest.raises(ConfigError, match="is no checkout of Megatron-LM: it has no pretrain_gpt.py"):
        megatron.run([f"--megatron={tmp_path}", "--"])


def test_a_checkout_of_another_release_names_both(launched, tmp_path, capsys):
    megatron.run([f"--megatron={_checkout(tmp_path, '0.15.2')}", "--"])
    text = capsys.readouterr().err
    assert f"megatron-core 0.16.1 is installed, the Megatron-LM checkout {tmp_path} is 0.15.2" in text
    assert "pip install megatron-core==0.15.2" in text


def test_a_script_that_is_not_there(launched, tmp_path):
    with pytest.raises(ConfigError, match="--script pretrain_t6.py: .* has no such file"):
        megatron.run([f"--megatron={_checkout(tmp_path)}", "--script", "pretrain_t6.py", "--"])
