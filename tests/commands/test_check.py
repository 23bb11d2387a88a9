"""`python -m ext check`: exit codes, one JSON object whatever happens, text for people."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from ext.commands.check import check

app = typer.Typer()
app.command()(check)


@pytest.fixture
def write(tmp_path):
    def to_file(content):
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return to_file


def run(*arguments):
    """Exit code and the JSON object on standard output."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    answer = json.loads(result.stdout)
    assert set(answer) == {"ok", "problems"}
    assert answer["ok"] == (answer["problems"] == []) == (result.exit_code == 0)
    assert all(set(problem) == {"key", "message"} for problem in answer["problems"])
    return result.exit_code, answer["problems"]


GOOD = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "ext": {"pipeline": {"schedule": "shifted_critical_path"}, "recompute": {"policy": [4, 0]}},
}
LAYOUT = ("--world-size", 8, "--pipeline-stages", 2, "--tensor-parallel", 2, "--num-layers", 12)


def test_ok(write):
    assert run(write(GOOD)) == (0, [])
    assert run(write(GOOD), *LAYOUT) == (0, [])


def test_typos(write):
    code, found = run(write({"ext": {"pipelin": {}, "pipeline": {"schedul": "x"}, "recompute": {"polcy": "full"}}}))
    assert code == 3
    assert {problem["key"]: problem["message"].partition(" Allowed")[0] for problem in found} == {
        "ext.pipelin": "unknown key. Did you mean 'pipeline'?",
        "ext.pipeline.schedul": "unknown key. Did you mean 'schedule'?",
        "ext.recompute.polcy": "unknown key. Did you mean 'policy'?",
    }


def test_too_few_micro_batches(write):
    config = {**GOOD, "train_batch_size": 16}
    code, (problem,) = run(write(config), *LAYOUT)
    assert code == 3
    assert problem == {
        "key": "ext.pipeline.schedule",
        "message": "schedule 'shifted_critical_path' needs at least 4 micro-batches per step, "
        "gradient_accumulation_steps gives 2. Raise gradient_accumulation_steps to 4 or more, or use the schedule "
        "'1f1b'.",
    }


def test_batch_arithmetic(write):
    code, (problem,) = run(write({**GOOD, "train_batch_size": 60}), *LAYOUT)
    assert (code, problem["key"]) == (3, "train_batch_size")
    assert problem["message"].startswith("60 != 4 x GAS x 2 for any whole GAS ")
    assert problem["message"].endswith(" Nearest legal: 56 (GAS 7) and 64 (GAS 8).")


def test_every_number_is_used(write):
    code, found = run(write(GOOD), "--world-size", 7, "--pipeline-stages", 3, "--num-layers", 2)
    assert code == 3
    assert [problem["key"] for problem in found] == [
        "world_size",
        "num_layers",
        "ext.recompute.policy",
        "ext.recompute.policy",
        "ext.recompute.policy",
    ]
    code, found = run(write({}), "--world-size", 0, "--pipeline-stages", -1, "--tensor-parallel", 0, "--num-layers", -5)
    assert [problem["key"] for problem in found] == ["world_size", "pipeline_stages", "tensor_parallel", "num_layers"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"a": 1, "a": 2}', "[" * 10_000, '{"ext": []}', "\0", "{]"]
)
def test_unreadable_files_give_json_too(write, content):
    path = write(content)
    code, (problem,) = run(path)
    assert code == 3
    assert problem["key"] in (path, "ext")


@pytest.mark.parametrize("name", ["/no/such/file.json", "", "/dev/null", "/", "ds_config.json"])
def test_no_config(name):
    code, found = run(name)
    assert (code, len(found)) == (3, 1)


def test_text(write):
    path = write({"ext": {"pipelin": {}}})
    result = CliRunner().invoke(app, [path])
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ext.pipelin: unknown key. Did you mean 'pipeline'? Allowed: enabled, pipeline, ")
    assert lines[1:] == [f"{path}: 1 problem(s)"]
    assert CliRunner().invoke(app, [write(GOOD)]).stdout == f"{path}: ok\n"


def test_brackets_are_no_markup(write):
    result = CliRunner().invoke(app, [write({"ext": {"[red]pipelin[/red]": {}, "recompute": {"policy": [-1]}}})])
    assert "ext.[red]pipelin[/red]: unknown key." in result.stdout
    assert "found [-1]; allowed" in result.stdout


def test_as_a_program(write):
    command = [sys.executable, "-m", "ext", "check", write({"ext": {"pipelin": {}}}), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (3, "")
    assert json.loads(answer.stdout)["problems"][0]["key"] == "ext.pipelin"
