"""`python -m ext simulate`: the contract of its JSON, exit codes, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ext.__main__ import COMMANDS, EXIT_BAD_CONFIG, EXIT_INFEASIBLE, main


def call(capsys, text: str, code: int = 0) -> dict:
    """Run with --json; standard output is one JSON object whatever happens."""
    assert main(["simulate", *text.split(), "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def problems(capsys, text: str) -> list[str]:
    answer = call(capsys, text, EXIT_BAD_CONFIG)
    assert list(answer) == ["error"]
    return answer["error"].splitlines()


BASE = "--stages 4 --micro-batches 8"
SCP = f"{BASE} --schedule shifted_critical_path"
UNIT = "--forward 1 --input-grad 1 --weight-grad 1 --recompute 1 --p2p 0 --stash 0.06"


def test_the_worked_example(capsys):
    answer = call(capsys, f"{SCP} {UNIT} --recompute-policy full --num-layers 32 --layers-per-stage 8,8,8,8")
    assert answer["step_time"] == 38
    assert answer["bubble_share"] == pytest.approx(1 - 120 / 152)
    assert answer["recompute_share"] == pytest.approx(24 / 152)
    assert answer["peak_activations"] == [1.18, 1.18, 1.18, 1]
    assert answer["peak_in_flight"] == [4, 3, 3, 1]
    assert answer["layers_per_stage"] == [8, 8, 8, 8]
    assert answer["recomputed_layers"] == [8, 8, 8, 0]
    assert list(answer["orders"]) == ["0", "1", "2", "3"]
    assert answer["orders"]["2"][:8] == ["2F0", "2F1", "2F2", "2R0", "2B0", "2R1", "2B1", "2F3"]
    assert answer["orders"]["3"][:4] == ["3F0", "3B0", "3F1", "3B1"]


@pytest.mark.parametrize(
    ("schedule", "policy", "step_time", "recomputed"),
    [
        ("1f1b", "", 33, [0, 0, 0, 0]),
        ("1f1b", "--recompute-policy none", 33, [0, 0, 0, 0]),
        ("1f1b", "--recompute-policy full", 44, [8, 8, 8, 8]),
        ("gpipe", "", 33, [0, 0, 0, 0]),
        ("zb_h1", "--recompute-policy default", 27, [0, 0, 0, 0]),
        ("early_recompute", "", 41, [8, 8, 8, 8]),
        ("last_no_recompute", "--recompute-policy full", 39, [8, 8, 8, 0]),
        ("shifted_critical_path", "", 38, [8, 8, 8, 0]),
        ("shifted_critical_path", "--recompute-policy none", 33, [0, 0, 0, 0]),
    ],
)
def test_policies(capsys, schedule, policy, step_time, recomputed):
    answer = call(capsys, f"{BASE} --schedule {schedule} {policy}")
    assert answer["step_time"] == step_time
    assert answer["recomputed_layers"] == recomputed


def test_times_scale_with_the_layers_of_a_stage(capsys):
    # Stages of 3 and 1 layers where N/P is 2: times 1.5 and 0.5 of the given ones.
    layers = "--stages 2 --micro-batches 1 --schedule 1f1b --layers-per-stage 3,1"
    answer = call(capsys, f"{layers} --forward 2 --input-grad 4 --weight-grad 6 --num-layers 4")
    assert answer["step_time"] == 2 * 12
    assert answer["peak_activations"] == [1.5, 0.5]
    assert call(capsys, f"{layers} --forward 2 --input-grad 4 --weight-grad 6") == answer
    full = call(capsys, f"{layers} --stash 0.1 --recompute-policy full")
    # Rank 0 holds its stash and one of its three layers: 0.15 + 0.5; rank 1 its only layer: 0.05 + 0.5.
    assert full["peak_activations"] == [0.65, 0.55]
    assert full["recompute_share"] == pytest.approx(2 / 16)


def test_layers_default_to_eight_per_stage_and_uneven_counts_sum_up(capsys):
    assert call(capsys, f"{BASE} --schedule 1f1b")["layers_per_stage"] == [8, 8, 8, 8]
    assert call(capsys, f"{BASE} --schedule 1f1b --num-layers 30")["layers_per_stage"] == [8, 8, 7, 7]


def test_latency_unequal_times_and_the_default_of_recompute(capsys):
    one = "--stages 3 --micro-batches 1 --schedule 1f1b"
    assert call(capsys, f"{one} --p2p 0.25")["step_time"] == 9 + 4 * 0.25
    assert call(capsys, f"{one} --forward 2 --recompute-policy full")["step_time"] == 3 * (2 + 2 + 2)
    assert call(capsys, f"{one} --forward 2 --recompute 0.5 --recompute-policy full")["step_time"] == 3 * 4.5


def test_extra_warmup_forwards_follow_from_the_times(capsys):
    order = call(capsys, f"{SCP} --input-grad 2 --recompute-policy full")["orders"]["2"]
    assert order[:5] == ["2F0", "2F1", "2F2", "2F3", "2R0"]


def test_a_schedule_of_a_users_own(capsys):
    answer = call(capsys, f"{BASE} --schedule ext.pipeline.schedules.gpipe:GPipe")
    assert answer["schedule"] == "gpipe"


def test_extreme_but_legal_numbers(capsys):
    times = "--forward 1e-100 --input-grad 1e100 --weight-grad 1e-100 --recompute 0 --p2p 1e100"
    for policy in ("none", "full"):
        answer = call(capsys, f"{SCP} {times} --recompute-policy {policy}")
        assert 8e100 < answer["step_time"] < 1e102
        assert main(["simulate", *f"{SCP} {times} --recompute-policy {policy} --grid".split()]) == 0
        capsys.readouterr()


def test_one_rank_is_a_pipeline_too(capsys):
    for name in ("1f1b", "shifted_critical_path", "zb_h1"):
        assert call(capsys, f"--stages 1 --micro-batches 4 --schedule {name}")["bubble_share"] == 0


@pytest.mark.parametrize("given", [1, 2, 3])
def test_too_few_microbatches(capsys, given):
    (problem,) = problems(capsys, f"--stages 4 --micro-batches {given} --schedule shifted_critical_path")
    assert "needs at least 4 micro-batches" in problem
    assert f"gives {given}." in problem
    assert "Raise gradient_accumulation_steps to 4" in problem
    assert "'1f1b'" in problem


def test_unknown_and_unbuilt_names(capsys):
    (typo,) = problems(capsys, f"{BASE} --schedule shifted_critcal_path")
    assert "unknown schedule 'shifted_critcal_path'. Did you mean 'shifted_critical_path'?" in typo
    (typo,) = problems(capsys, f"{BASE} --schedule 1f1b --recompute-policy ful")
    assert "unknown policy 'ful'. Did you mean 'full'?" in typo
    (typo,) = problems(capsys, f"{BASE} --schedule no.such:Thing")
    assert "cannot be imported" in typo


def test_what_a_later_release_has_is_refused_as_such(capsys):
    (problem,) = problems(capsys, f"{BASE} --schedule 1f1b --recompute-policy delta")
    assert "not built in this release" in problem
    assert "Did you mean" not in problem


def test_a_schedule_with_options_of_its_own_is_refused(capsys):
    assert "'plan_file' needs options" in "\n".join(problems(capsys, f"{BASE} --schedule plan_file"))


@pytest.mark.parametrize(
    ("schedule", "budget", "step_time", "recomputed", "peaks"),
    [
        ("1f1b", 2, 66.125, [5, 4, 0, 0], [1.775, 1.715, 2, 1]),
        ("shifted_critical_path", 1.25, 70, [8, 8, 8, 0], [1.18, 1.18, 1.18, 1]),
        ("shifted_critical_path", 3, 61.5, [3, 0, 0, 0], [2.715, 3, 2, 1]),
    ],
)
@pytest.mark.parametrize("policy", ["", "--recompute-policy stage_aware"])
def test_a_budget_decides_what_is_recomputed(capsys, schedule, budget, step_time, recomputed, peaks, policy):
    text = f"--stages 4 --micro-batches 16 --schedule {schedule} {UNIT} {policy} --activation-budget {budget}"
    answer = call(capsys, text)
    assert answer["recomputed_layers"] == recomputed
    assert answer["step_time"] == step_time
    assert answer["peak_activations"] == peaks


def test_a_budget_that_cannot_be_kept(capsys):
    answer = call(capsys, f"{BASE} --schedule 1f1b {UNIT} --activation-budget 0.3", EXIT_INFEASIBLE)
    stage, other, smallest = answer["error"].splitlines()
    assert stage == "--activation-budget: stage 0: needs at least 0.365, the budget is 0.3."
    assert other == "--activation-budget: stage 1: needs at least 0.305, the budget is 0.3."
    assert "0.365, 0.305, 0.245, 0.185" in smallest
    answer = call(capsys, f"{BASE} --schedule 1f1b --recompute-policy none --activation-budget 3.5", EXIT_INFEASIBLE)
    assert answer["error"].startswith("--activation-budget: rank 0 holds 4, the budget is 3.5.")
    (missing,) = problems(capsys, f"{BASE} --schedule 1f1b --recompute-policy stage_aware")
    assert "give --activation-budget" in missing


def test_every_violation_at_once(capsys):
    listed = problems(
        capsys,
        "--stages 4 --micro-batches 2 --schedule shifted_critical_path --forward 0 --input-grad -1 --weight-grad nan "
        "--recompute inf --p2p -1 --stash 1.5 --recompute-policy fulll --num-layers 9 --layers-per-stage 2,0,2 "
        "--search-seconds 0",
    )
    starts = [problem.split(":")[0] for problem in listed]
    assert starts == [
        "--forward",
        "--input-grad",
        "--weight-grad",
        "--search-seconds",
        "--recompute",
        "--p2p",
        "--stash",
        "--schedule",
        "--recompute-policy",
        "--layers-per-stage",
        "--layers-per-stage",
        "--layers-per-stage",
    ]
    assert "found 3 numbers for 4 stages" in listed[-3]
    assert "every stage needs at least one layer" in listed[-2]
    assert "2,0,2 sums to 4, --num-layers says 9" in listed[-1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--stages 0 --micro-batches 4 --schedule 1f1b", "--stages: found 0; give a whole number from 1 to 500000"),
        ("--stages 4 --micro-batches -3 --schedule 1f1b", "--micro-batches: found -3"),
        (f"{BASE} --schedule 1f1b --num-layers 3", "--num-layers: 3 layers cannot fill 4 pipeline stages"),
        (f"{BASE} --schedule 1f1b --num-layers 0", "--num-layers: found 0"),
        (f"{BASE} --schedule 1f1b --layers-per-stage 2,x,2,2", "found '2,x,2,2'; give whole numbers with commas"),
        (f"{BASE} --schedule 1f1b --layers-per-stage 2,-2,2,2", "every stage needs at least one layer"),
        (f"{BASE} --schedule 1f1b --weight-grad -inf", "--weight-grad: found -inf"),
        ("--stages 4 --micro-batches 1000000000 --schedule 1f1b", "--micro-batches: found 1000000000"),
        (f"--stages 1{'0' * 400} --micro-batches 1 --schedule 1f1b", "--stages: found a number of more than 60 digits"),
        ("--stages 1000 --micro-batches 1000 --schedule 1f1b", "found 1000000; a simulation holds up to 500000"),
        (f"{BASE} --schedule 1f1b --num-layers 1{'0' * 400}", "--num-layers: found a number of more"),
        (f"{BASE} --schedule 1f1b --layers-per-stage 1{'0' * 70},1,1,1", "sums to more than 500000 layers"),
        (f"{BASE} --schedule 1f1b --forward 1e308", "--forward: found 1e+308; give a number above 0, up to 1e+100"),
        (f"{BASE} --schedule 1f1b --input-grad 1e-320", "--input-grad: found 1e-320"),
        (f"{BASE} --schedule 1f1b --p2p 1e400", "--p2p: found inf"),
        (f"{BASE} --schedule :", "cannot be imported"),
        (f"{BASE} --schedule os:path", "is no subclass of Schedule"),
        ("--stages four --micro-batches 4 --schedule 1f1b", "--stages"),
        ("--micro-batches 4 --schedule 1f1b", "--stages"),
        (f"{BASE} --schedule 1f1b --fast", "--fast"),
        (f"{BASE} --schedule 1f1b leftover", "leftover"),
    ],
)
def test_bad_input(capsys, options, text):
    (problem,) = problems(capsys, options)
    assert text in problem


def test_text_shows_numbers_and_a_small_grid(capsys):
    assert main(["simulate", *SCP.split(), "--stash", "0.06"]) == 0
    out = capsys.readouterr().out
    assert "step time 38 (simulated)" in out
    assert "S1|.  F0 F1 F2 R0 .  .  .  B0 B0 F3" in out
    assert "1.18" in out
    assert main(["simulate", *SCP.split(), "--no-grid"]) == 0
    assert "S1|" not in capsys.readouterr().out


def test_text_leaves_a_large_grid_out_unless_it_is_asked_for(capsys):
    large = ["simulate", *["--stages", "4", "--micro-batches", "64", "--schedule", "1f1b"]]
    assert main(large) == 0
    assert "S0|" not in capsys.readouterr().out
    assert main([*large, "--grid"]) == 0
    assert "S0|F0" in capsys.readouterr().out


def test_errors_as_text_go_to_standard_error(capsys):
    assert main(["simulate", *f"{BASE} --schedule zb_h2".split()]) == EXIT_BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --schedule: unknown schedule 'zb_h2'. Did you mean 'zb_h1'?")
    assert main(["simulate", "--stages"]) == EXIT_BAD_CONFIG
    assert "--stages" in capsys.readouterr().err


def test_the_group_of_commands(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["simulat"]) == EXIT_BAD_CONFIG
    assert "unknown command 'simulat'. Did you mean 'simulate'?" in capsys.readouterr().err
    assert main(["simulate", "--help"]) == 0
    assert "--micro-batches" in capsys.readouterr().out


def test_the_module_runs_as_a_program():
    def run(schedule: str) -> subprocess.CompletedProcess[str]:
        options = ["--stages", "2", "--micro-batches", "2", "--schedule", schedule, "--json"]
        command = [sys.executable, "-m", "ext", "simulate", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run("1f1b")
    assert done.returncode == 0
    assert json.loads(done.stdout)["step_time"] == 9
    done = run("1f2b")
    assert done.returncode == EXIT_BAD_CONFIG
    assert "Did you mean '1f1b'?" in json.loads(done.stdout)["error"]
    assert done.stderr == ""
