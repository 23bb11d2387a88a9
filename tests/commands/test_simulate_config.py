"""`simulate --config`: a ds_config and the shape of a GPT become seconds and bytes per stage."""

from __future__ import annotations

import json

import pytest

from ext.__main__ import EXIT_BAD_CONFIG, EXIT_INFEASIBLE, main
from ext.pipeline.memory_table import GIB

MODEL = {"hidden_size": 1024, "num_heads": 16, "num_layers": 24, "seq_length": 1024, "vocab_size": 50304}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "pipeline": {"stages": 4},
}


@pytest.fixture
def call(tmp_path, capsys):
    """Run on a config; gives the JSON answer, or the text where asked."""

    def run(ext: dict, *options: str, code: int = 0, as_json: bool = True, **keys):
        (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, **keys, "ext": ext}))
        (tmp_path / "gpt.json").write_text(json.dumps(MODEL))
        arguments = ["simulate", "--config", str(tmp_path / "ds.json"), "--model", str(tmp_path / "gpt.json"), *options]
        assert main([*arguments, *(["--json"] if as_json else [])]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if as_json else out + err

    return run


def test_memory_of_every_stage(call):
    answer = call({"pipeline": {"schedule": "1f1b"}})
    assert answer["layers_per_stage"] == [7, 6, 6, 7]
    assert answer["recomputed_layers"] == [0, 0, 0, 0]
    assert 0 < answer["step_time"] < 60
    memory = answer["memory"]
    parameters = [row["states"]["parameters"] for row in memory]
    assert parameters == [2 * n for n in (128_137_216, 75_577_344, 75_577_344, 127_090_688)]
    assert [row["states"]["total"] for row in memory] == [9 * size for size in parameters]  # 2 + 4 + 12 bytes each
    assert [row["in_flight"] for row in memory] == [4, 3, 2, 1]
    assert memory[1]["activations"] == 3 * (6 * 34 + 4) * 4 * 1024 * 1024
    assert memory[3]["loss"] > 4 * 4 * 1024 * 50304
    assert all(row["live"] == row["states"]["total"] + row["activations"] for row in memory)


def test_a_budget_is_kept_by_every_stage(call):
    answer = call({"recompute": {"policy": "stage_aware", "memory_budget_gib": [4.2, 3, 3, 8]}})
    counts = answer["recomputed_layers"]
    assert counts[0] > 0
    assert counts[3] == 0
    assert all(row["total"] <= row["budget"] for row in answer["memory"])
    assert [row["budget"] for row in answer["memory"]] == [round(gib * GIB) for gib in (4.2, 3, 3, 8)]


def test_partitions_and_shards(call):
    assert call({"pipeline": {"partition": [3, 7, 7, 7]}})["layers_per_stage"] == [4, 7, 7, 8]
    aware = call({"pipeline": {"partition": "recompute_aware"}})["layers_per_stage"]
    assert sum(aware) == 26
    assert aware[3] < 7  # The head takes as long as several layers.
    one = call({"pipeline": {}}, zero_optimization={"stage": 1, "reduce_bucket_size": 1000})
    two = call({"pipeline": {}}, "--world-size", "8", zero_optimization={"stage": 1, "reduce_bucket_size": 1000})
    for a, b in zip(one["memory"], two["memory"], strict=True):
        assert b["states"]["optimizer"] == a["states"]["optimizer"] / 2


def test_text_marks_the_heaviest(call):
    text = call({"pipeline": {}}, "--no-grid", as_json=False)
    assert "memory per stage in GiB" in text
    assert text.count("<- heaviest") == 1
    assert " s (simulated)" in text


def test_what_does_not_fit_says_what_would(call):
    error = call({"recompute": {"policy": "none", "memory_budget_gib": 5}}, code=EXIT_INFEASIBLE)["error"]
    assert "stage 0 needs " in error
    assert "Nearest change that fits: " in error
    error = call({"recompute": {"policy": "stage_aware", "memory_budget_gib": 1}}, code=EXIT_INFEASIBLE)["error"]
    assert error.startswith("ext.recompute.memory_budget_gib: stage 0: needs at least ")


def test_bad_input(call, tmp_path):
    assert "Did you mean 'gpt-20b'?" in call({}, "--model", "gpt-20c", code=EXIT_BAD_CONFIG)["error"]
    assert "Did you mean 'a100-80gb'?" in call({}, "--device", "a100-80g", code=EXIT_BAD_CONFIG)["error"]
    assert "--stages: missing" in call({}, code=EXIT_BAD_CONFIG, pipeline={})["error"]
    error = call({"recompute": {"polcy": "full"}}, code=EXIT_BAD_CONFIG)["error"]
    assert "Did you mean 'policy'?" in error
    (tmp_path / "odd.json").write_text('{"hidden_size": 10, "num_heads": 3}')
    assert "--model: " in call({}, "--model", str(tmp_path / "odd.json"), code=EXIT_BAD_CONFIG)["error"]
    error = call({}, code=EXIT_BAD_CONFIG, gradient_accumulation_steps=None, train_micro_batch_size_per_gpu=None)[
        "error"
    ]
    assert "gradient_accumulation_steps: missing" in error


def test_without_a_config_the_other_options_are_needed(capsys):
    assert main(["simulate", "--stages", "4", "--json"]) == EXIT_BAD_CONFIG
    assert json.loads(capsys.readouterr().out)["error"].splitlines() == [
        "--micro-batches: missing; give it, or --config.",
        "--schedule: missing; give it, or --config.",
    ]


def test_units_of_layers_are_decided_from_formulas(call):
    auto = {"type": "auto", "search_seconds": 0.3}
    found = []
    for schedule, policy in (("1f1b", "stage_aware"), ("1f1b", "lynx_heu"), (auto, "lynx_heu")):
        recompute = {"policy": policy, "memory_budget_gib": [3.6, 3, 3, 8]}
        answer = call({"pipeline": {"schedule": schedule, "tolerance": 0}, "recompute": recompute})
        assert all(row["total"] <= row["budget"] for row in answer["memory"])
        assert answer["recomputed_layers"][0] > 0
        found.append(answer["step_time"])
    whole_layers, units, searched = found
    assert searched <= units < whole_layers
