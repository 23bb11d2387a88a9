"""The recompute benchmarks at toy size: rows as promised, equal gradients, sixty fixed cases."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ext.recompute.heu import solve_heu

SCRIPTS = Path(__file__).resolve().parents[2] / "run_scripts"
CONTRACT = {"name", "measured", "reference", "ratio", "unit", "command"}


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(module, *arguments):
    import typer

    app = typer.Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.dist
def test_a_pipeline_of_two_ranks_gives_a_row_for_every_mode():
    module = script("bench_recompute")
    size = (
        "--hidden",
        "32",
        "--heads",
        "2",
        "--seq",
        "16",
        "--num-layers",
        "3",
        "--repeats",
        "1",
        "--micro-batches",
        "3",
    )
    output = run(module, "--pipeline-parallel", "2", *size, "--saved", "0.5,0.6", "--json")
    rows = {row["name"]: row for row in map(json.loads, (line for line in output.splitlines() if line[:1] == "{"))}
    assert all(set(row) >= CONTRACT for row in rows.values())
    assert {"pp2_step_full", "pp2_step_full_reentrant", "pp2_step_selective", "pp2_step_heu_0.5"} < set(rows)
    # Tables follow times, which say little of layers so small: only the budget binds them.
    assert min(rows[f"pp2_step_heu_{share}"]["saved_share"] for share in (0.5, 0.6)) >= 0.4


def test_every_mode_gives_a_row_and_the_same_gradients():
    module = script("bench_recompute")
    size = (
        "--hidden",
        "32",
        "--heads",
        "2",
        "--seq",
        "16",
        "--num-layers",
        "2",
        "--repeats",
        "1",
        "--budgets",
        "0.5,0.28",
    )
    rows = {row["name"]: row for row in map(json.loads, run(module, *size, "--json").splitlines())}
    assert all(set(row) >= CONTRACT for row in rows.values())
    assert rows["recompute_step_none"]["ratio"] == 1
    assert rows["recompute_step_units_keep_all"]["saved_share"] == pytest.approx(0.0, abs=0.02)
    assert rows["recompute_step_full"]["saved_share"] > rows["recompute_step_heu_0.28"]["saved_share"] > 0.5
    assert rows["recompute_65_over_none"]["saved_share"] >= module.SAVED_SHARE
    text = run(module, *size)
    assert "planned/measured" in text


def test_a_budget_below_the_smallest_is_refused():
    import typer

    app = typer.Typer()
    app.command()(script("bench_recompute").main)
    result = CliRunner().invoke(app, ["--hidden", "32", "--heads", "2", "--seq", "16", "--budgets", "0.01"])
    assert result.exit_code == 2


def test_the_solver_benchmark_has_sixty_solvable_cases():
    module = script("bench_solver")
    assert len(module.CASES) == len(set(module.CASES)) == 60
    assert {case[0] for case in module.CASES} == {"gpt-1.3b", "gpt-4.7b", "gpt-7b", "gpt-13b", "gpt-20b"}
    assert min(case[2] for case in module.CASES) == 14
    assert max(case[2] for case in module.CASES) == 230
    for case in module.CASES[::7]:
        solve_heu(module.problem_of(case))
    assert module._percentile(list(range(1, 61)), 0.95) == 57
