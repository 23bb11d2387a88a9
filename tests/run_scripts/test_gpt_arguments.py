"""What the job refuses before any rank starts: one text, exit code 3."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ext.core.errors import ConfigError
from gpt import arguments, check

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "run_scripts" / "pretrain_gpt.py"


def _run(*options, program=PROGRAM):
    environment = {k: v for k, v in os.environ.items() if k not in check.LAUNCHER_VARIABLES}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, program, *map(str, options)], env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_default_job_passes():
    result = _run("--check", "--world-size", 2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_check_does_not_wait_for_torch():
    code = (
        "import sys; from gpt import check, arguments; check.check(arguments.parse(['--check', '--world-size', '2']));"
    )
    code += "print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'run_scripts'}"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_unknown_options_are_named_with_the_nearest():
    with pytest.raises(ConfigError, match="--layers: unknown option. .*--num-layers"):
        arguments.parse(["--layers", "3"])
    with pytest.raises(ConfigError, match="invalid int value: 'x'"):
        arguments.parse(["--steps", "x"])


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        arguments.parse(["--steps", "0", "--hidden-size", "100", "--num-heads", "3", "--dropout", "1.5"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["--steps", "--dropout", "--hidden-size"]
    assert "99 and 102" in caught.value.problems[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--world-size", 3], "3 ranks cannot be cut"),
        (["--world-size", 2, "--num-layers", 1], "1 transformer blocks cannot fill 2"),
        (["--world-size", 2, "--data-path", "/none"], "/none does not exist"),
        (["--world-size", 2, "--config", "/none.json"], "/none.json"),
        (["--world-size", 2, "--vocab-size", 100], "--vocab-size: 100 is too small, the tokenizer has 257"),
        (["--world-size", 4, "--num-experts", 8, "--expert-parallel", 4], "4 ranks do not divide the 2 replicas"),
        (
            ["--world-size", 2, "--config", PROGRAM.parent / "configs" / "gpt_moe_ep2.json"],
            "ext.moe: the model has no experts. Give --num-experts",
        ),
        (["--world-size", 2, "--tokenizer", "/none.json"], "--tokenizer: /none.json cannot be read"),
    ],
)
def test_refused_with_one_text(options, says):
    result = _run("--check", *options)
    assert result.returncode == 3
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_experts_that_do_not_fit():
    with pytest.raises(ConfigError) as caught:
        arguments.parse(["--num-experts", "6", "--top-k", "7", "--expert-parallel", "4"])
    assert caught.value.problems == (
        "--top-k: 7 experts per token, --num-experts gives 6. Lower it or give more.",
        "--expert-parallel: 4 ranks cannot share 6 experts evenly. Use a divisor of 6.",
    )
    with pytest.raises(ConfigError, match="--expert-parallel: 2 without --num-experts"):
        arguments.parse(["--expert-parallel", "2"])


def test_an_unknown_schedule_is_refused_with_the_nearest(tmp_path):
    config = json.loads(arguments.DEFAULT_CONFIG.read_text())
    config["ext"]["pipeline"]["schedule"] = "shifted_critcal_path"
    (tmp_path / "ds.json").write_text(json.dumps(config))
    result = _run("--check", "--world-size", 2, "--config", tmp_path / "ds.json")
    assert result.returncode == 3
    assert "Did you mean 'shifted_critical_path'?" in result.stderr


def test_says_how_to_start_it_when_no_launcher_did():
    result = _run()
    assert result.returncode == 3
    assert "RANK, WORLD_SIZE" in result.stderr
    assert "pretrain_gpt.sh" in result.stderr


def test_bf16_without_zero_trains_only_without_checkpoints(tmp_path):
    config = {**json.loads(arguments.DEFAULT_CONFIG.read_text()), "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = ["--check", "--world-size", "2", "--config", str(tmp_path / "ds.json")]
    with pytest.raises(ConfigError, match=r"bf16\.enabled"):
        check.check(arguments.parse(options))
    check.check(arguments.parse([*options, "--save-every", "0"]))

    config["zero_optimization"] = {"stage": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    check.check(arguments.parse(options))


def test_stages_come_from_the_option_then_the_config_then_the_ranks(tmp_path):
    def stages(config, *options):
        (tmp_path / "ds.json").write_text(json.dumps({"gradient_accumulation_steps": 8, **config}))
        parsed = arguments.parse(["--check", "--world-size", "4", "--config", str(tmp_path / "ds.json"), *options])
        return check.check(parsed)[1]

    sizes = {"train_micro_batch_size_per_gpu": 1}
    assert stages({**sizes, "pipeline": {"stages": 2}}, "--pipeline-stages", "1") == 1
    assert stages({**sizes, "pipeline": {"stages": 2}}) == 2
    assert stages({**sizes, "pipeline": {"stages": "auto"}}) == 4
    assert stages(sizes) == 4
    with pytest.raises(ConfigError, match=r"pipeline\.stages: found 0"):
        stages({**sizes, "pipeline": {"stages": 0}})
