"""The CPU stand-ins: not part of a GPU run, and refused beside a CUDA device."""

import os
import subprocess
import sys

import pytest
import torch

from ext.adapters.megatron import apex, launch
from ext.core.errors import ConfigError


def _fake_checkout(folder):
    """Enough of a checkout for the launcher: a script, and training code that notes what is asked of it."""
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").touch()
    (training / "arguments.py").write_text(
        "import argparse\ndef parse_args(extra_args_provider=None, ignore_unknown_args=False):\n"
        "    parser = argparse.ArgumentParser()\n    parser.add_argument('--fp16', action='store_true')\n"
        "    parser.set_defaults(micro_batch_size=None, global_batch_size=None, pipeline_model_parallel_size=1)\n"
        "    parser.set_defaults(tensor_model_parallel_size=1, context_parallel_size=1, world_size=1, num_layers=2)\n"
        "    return extra_args_provider(parser).parse_args()\n"
    )
    (training / "initialize.py").write_text("from megatron.training.arguments import parse_args\n")
    script = folder / "pretrain_gpt.py"
    script.write_text(
        "import sys\nfrom megatron.training.initialize import parse_args\nargs = parse_args()\n"
        "from megatron.core.pipeline_parallel import get_forward_backward_func as get\n"
        "stand_ins = 'ext.adapters.megatron.cpu' in sys.modules\n"
        "from megatron.core.models.gpt import gpt_layer_specs\n"
        "assert gpt_layer_specs.LNImpl.__name__ == 'WrappedTorchNorm'\n"
        "print('ran', type(get(2)).__name__, args.ext_recompute_policy, args.fp16, stand_ins)\n"
    )
    return script


def test_a_run_without_the_switch_goes_through_the_launcher_without_stand_ins(tmp_path):
    script = _fake_checkout(tmp_path)
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from pathlib import Path\nfrom ext.adapters.megatron import launch\n"
        "for given in (['--ext-recompute-policy', 'full'], ['--ext-enabled', 'false', '--fp16'], ['--fp16'],\n"
        "              ['--ext-watchdog', '60']):\n"
        f"    launch.run(Path({str(script)!r}), given, checkout=Path({str(tmp_path)!r}), cpu=False)\n"
    )
    # PyPI's apex is a web framework, and megatron.core asks for no more than its name.
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("class Router: ...\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd()))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.stdout.splitlines() == [
        "ran PlanForwardBackward full False False",
        "ran function None True False",
        "ran function None True False",
        "ran PlanForwardBackward None False False",
    ], done.stderr


def test_nvidias_apex_is_left_alone(tmp_path, monkeypatch):
    for name in ("multi_tensor_apply", "normalization", "optimizers"):
        (tmp_path / "apex" / name).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert not apex.hide_namesake()
    assert "apex" not in sys.modules


def test_a_cuda_device_refuses_them(monkeypatch):
    from ext.adapters.megatron import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--cpu: found 2 CUDA devices. Remove --cpu"):
        cpu.install()
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_a_missing_module_of_the_training_code_is_named(tmp_path, monkeypatch):
    def missing(cpu):
        raise ModuleNotFoundError("No module named 'regex'", name="regex")

    monkeypatch.setattr(launch, "_prepare", missing)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="needs the module 'regex', which is not installed. Run: pip install regex"):
        launch.run(tmp_path / "pretrain_gpt.py", [], checkout=tmp_path, cpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'regex', and there is no GPU here. Add --cpu in front of the script"):
        launch.run(tmp_path / "pretrain_gpt.py", [], checkout=tmp_path, cpu=False)
