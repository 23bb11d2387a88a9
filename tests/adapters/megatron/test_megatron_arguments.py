"""The flags: made from the model, read strictly, checked against Megatron's own."""

import argparse
import json
import re
import subprocess
import sys

import pytest

from ext.adapters.megatron import arguments, check
from ext.config import ExtConfig
from ext.config.release import BUILT
from ext.core.errors import ConfigError
from ext.pipeline.build import build_plan
from ext.pipeline.plan import PipelineShape
from ext.pipeline.plan_file import write_plan
from ext.pipeline.schedule import SCHEDULES


def _read(*given):
    return arguments.read(["--num-layers", "4", *given, "--fp16"])


def test_every_key_of_the_config_has_a_flag_and_help():
    paths = {flag.path for flag in arguments.flags()}
    # A key whose value is a part of its own has a flag for each key below it.
    assert {key for key in BUILT if key not in paths and not any(p.startswith(f"{key}.") for p in paths)} == set()
    assert all(flag.help and flag.name.startswith("--ext-") for flag in arguments.flags())
    text = arguments.add_arguments(argparse.ArgumentParser()).format_help()
    assert "megatron-deepspeed-ext" in text
    assert "Order of forwards, recomputes and backwards per rank." in re.sub(r"\s+", " ", text)


def test_values_as_in_the_config_file(tmp_path):
    file = tmp_path / "ext.json"
    block = {
        "pipeline": {"schedule": {"type": "shifted_critical_path", "extra_forwards": 2}},
        "recompute": {"policy": [2, 1]},
    }
    file.write_text(json.dumps(block))
    same = ExtConfig.from_block(block)
    schedule = '{"type": "shifted_critical_path", "extra_forwards": 2}'
    assert _read("--ext-config", str(file)).config == same
    assert _read("--ext-pipeline-schedule", schedule, "--ext-recompute-policy=2,1").config == same
    del block["recompute"]
    file.write_text(json.dumps(block))
    assert _read(f"--ext-config={file}", "--ext-recompute-policy", "[2, 1]").config == same
    assert _read().config is None
    assert _read("--ext-pipeline-schedule", "1f1b", "--ext-enabled", "false").config is None


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (["--ext-pipeline-schedul", "1f1b"], ["schedul: unknown flag. Did you mean '--ext-pipeline-schedule'?"]),
        (
            ["--ext-pipeline-schedule=shifted_critcal_path", "--ext-recompute-policy", "fll"],
            [
                "--ext-pipeline-schedule: unknown schedule 'shifted_critcal_path'. Did you mean 'shifted_critical_path",
                "--ext-recompute-policy: unknown policy 'fll'. Did you mean 'full'?",
            ],
        ),
        (["--ext-pipeline-schedule", '{"type": "zb_h1", "extr": 1}'], ["--ext-pipeline-schedule: extr: unknown key."]),
        (["--ext-pipeline-schedule"], ["Argument --ext-pipeline-schedule: expected one argument."]),
        (["--ext-enabled", "yes"], ["--ext-enabled: found \"yes\"; allowed: true or false."]),
        (["--ext-recompute-policy=none", "--ext-recompute-policy", "full"], ["policy: given more than once."]),
        (["--ext-recompute-policy", "delta"], ["--ext-recompute-policy: 'delta' is not built"]),
        (["--ext-pipeline-partition", "2,2"], ["--ext-pipeline-partition: "]),
        (["--ext-pipeline-schedule", "plan_file"], ["schedule: 'path' is missing. Allowed: a text; write {"]),
        (["--ext-watchdog", "0"], ["--ext-watchdog: found 0; allowed: a number of seconds above 0."]),
        (["--ext-self-check", "true"], ["--ext-self-check: not built"]),
        (["--ext-trace-steps", "1,2"], ["--ext-trace-path: missing. Allowed: the name of a file."]),
        (["--ext-trace-path", "t.json", "--ext-trace-steps", "3,2"], ["--ext-trace-steps: found [3, 2]; the first"]),
        (["--ext-moe-router-bias-rate", "0.1"], ["--ext-moe-router-bias-rate: not built for Megatron"]),
        (
            ["--ext-recompute-policy", "full", "--ext-recompute-overlap", "true"],
            ["--ext-recompute-overlap: goes with the policies 'lynx_heu' and 'lynx_opt', found 'full'"],
        ),
        (["--ext-moe-dispatcher", "aut"], ["--ext-moe-dispatcher: unknown dispatcher 'aut'. Did you mean 'auto'?"]),
        (
            ["--ext-moe-dispatcher", '{"type": "hierarchical", "deduplicate": true}'],
            ["--ext-moe-dispatcher: 'deduplicate' cannot work here"],
        ),
        (["--ext-config", "/nowhere.json"], ["/nowhere.json: no such file"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_flag(given, texts):
    with pytest.raises(ConfigError) as error:
        _read(*given)
    for text in texts:
        assert text in str(error.value)


def test_a_key_in_file_and_flag_is_refused(tmp_path):
    file = tmp_path / "ext.json"
    file.write_text('{"pipeline": {"schedule": "1f1b"}, "recompute": {"polcy": "full"}}')
    with pytest.raises(ConfigError) as error:
        _read("--ext-config", str(file), "--ext-pipeline-schedule", "gpipe")
    assert f"--ext-pipeline-schedule: also given as 'pipeline.schedule' in {file}. Remove one." in str(error.value)
    assert "ext.recompute.polcy: unknown key. Did you mean 'policy'?" in str(error.value)


def _args(**changes):
    """Megatron's arguments as parsed from a command line with few flags."""
    values = {
        "micro_batch_size": 2, "global_batch_size": 32, "rampup_batch_size": None, "world_size": 8, "num_layers": 8,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "context_parallel_size": 1,
        "transformer_impl": "local", "gradient_accumulation_fusion": False,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def _problems(given, **args):
    return check.problems(_args(**args), _read(*given))


@pytest.mark.parametrize(
    ("given", "args", "both"),
    [
        (["--ext-pipeline-schedule=gpipe"], {"num_layers_per_virtual_pipeline_stage": 1}, "--num-layers-per-virtual"),
        (["--ext-pipeline-schedule=gpipe"], {"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages"),
        (["--ext-recompute-policy=full"], {"recompute_granularity": "full"}, "--recompute-granularity (found full)"),
        (["--ext-recompute-policy=full"], {"recompute_activations": True}, "--recompute-activations"),
        (["--ext-recompute-policy=full"], {"fp8": "hybrid"}, "--fp8-format (found hybrid)"),
        (["--ext-pipeline-schedule=early_recompute"], {"recompute_granularity": "full"}, "--recompute-granularity"),
        (["--ext-pipeline-schedule=zb_h1"], {"transformer_impl": "transformer_engine"}, "--transformer-impl"),
        (["--ext-pipeline-schedule=zb_h1"], {"gradient_accumulation_fusion": True}, "--no-gradient-accumulation"),
        (["--ext-pipeline-schedule=zb_h1"], {"recompute_granularity": "full"}, "--recompute-granularity"),
        (["--ext-pipeline-schedule=1f1b"], {"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        (["--ext-pipeline-schedule=1f1b"], {"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work_name_both_flags(given, args, both):
    (problem,) = _problems(given, **args)
    assert both in problem
    assert given[0].partition("=")[0] in problem


@pytest.mark.parametrize(
    ("given", "args"),
    [
        ([], {"recompute_granularity": "full", "num_virtual_stages_per_pipeline_rank": 2}),
        (["--ext-pipeline-schedule=1f1b"], {"recompute_granularity": "full", "gradient_accumulation_fusion": True}),
        (["--ext-recompute-policy=full"], {"transformer_impl": "transformer_engine", "cuda_graph_impl": "none"}),
        (["--ext-recompute-policy=2,2,1,0"], {}),
    ],
)
def test_combinations_that_work(given, args):
    assert _problems(given, **args) == []


def test_a_dispatcher_needs_experts_and_megatrons_all_to_all():
    given = ["--ext-moe-dispatcher=hierarchical", "--ext-moe-topology-ranks-per-node=4"]
    (problem,) = _problems(given)
    assert problem == "--ext-moe-dispatcher: needs a model with experts. Give --num-experts, or remove it."
    (problem,) = _problems(given, num_experts=8, moe_token_dispatcher_type="allgather")
    assert "needs --moe-token-dispatcher-type alltoall, found allgather" in problem
    assert _problems(given, num_experts=8, moe_token_dispatcher_type="alltoall") == []


@pytest.mark.parametrize("given", ["--ext-moe-dispatcher=linear", "--ext-pipeline-schedule=1f1b"])
def test_experts_that_ranks_cannot_share_are_refused_with_the_numbers(given):
    def problems(**args):
        return _problems([given], moe_token_dispatcher_type="alltoall", **args)

    (problem,) = problems(num_experts=6, expert_model_parallel_size=4, pipeline_model_parallel_size=2)
    assert problem == (
        "--expert-model-parallel-size 4: so many ranks cannot share --num-experts 6 evenly. Use 1, 2, 3, 6, or another "
        "number of experts."
    )
    (problem,) = problems(num_experts=8, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    assert problem == (
        "--expert-model-parallel-size 4: 4 x 1 tensor-parallel ranks of an expert x 4 pipeline stages do not divide "
        "the 8 ranks. Lower one of them, or start other ranks."
    )
    (problem,) = problems(num_experts=4, moe_router_topk=5)
    assert problem == "--moe-router-topk 5: allowed are 1 to 4, the --num-experts. Lower it."
    assert problems(num_experts=8, expert_model_parallel_size=2, moe_router_topk=8) == []


def test_a_topology_that_does_not_fit_is_refused_before_launch():
    given = ["--ext-moe-dispatcher=auto", "--ext-moe-topology-ranks-per-node=3"]
    (problem,) = _problems(given, num_experts=8, moe_token_dispatcher_type="alltoall")
    assert problem.startswith("--ext-moe-topology-ranks-per-node: 3 does not divide the world size 8. Give the number")


def test_policies_that_measure_need_a_budget_on_cpu():
    given = ["--ext-recompute-policy=stage_aware"]
    assert _problems(given) == []
    (problem,) = check.problems(_args(), _read(*given), on_cpu=True)
    assert problem.startswith("--ext-recompute-memory-budget-gib: missing. On CPU the policy 'stage_aware' needs it")
    given.append("--ext-recompute-memory-budget-gib=2.5")
    assert check.problems(_args(), _read(*given), on_cpu=True) == []
    auto = ["--ext-pipeline-schedule", '{"type": "auto", "search_seconds": 1}', "--ext-pipeline-tolerance=0"]
    assert check.problems(_args(), _read(*auto), on_cpu=True) == []
    # it may recompute, and splits no backward where that cannot work
    (problem,) = _problems(auto, recompute_activations=True, gradient_accumulation_fusion=True)
    assert problem.startswith("--recompute-activations (found True) cannot go with --ext-pipeline-schedule")


def test_plan_files_are_read_before_launch(tmp_path):
    shape = PipelineShape(num_ranks=4, num_microbatches=8)
    for name in ("1f1b", "zb_h1"):
        plan = build_plan(SCHEDULES.get(name)(shape=shape), layers_per_stage=[2] * 4, recomputed_layers=[0] * 4)
        write_plan(tmp_path / f"{name}.json", plan)

    def given(name):
        return ["--ext-pipeline-schedule", json.dumps({"type": "plan_file", "path": str(tmp_path / f"{name}.json")})]

    assert _problems(given("1f1b"), gradient_accumulation_fusion=True) == []
    assert _problems(given("zb_h1")) == []
    (problem,) = _problems(given("zb_h1"), gradient_accumulation_fusion=True)
    assert "--no-gradient-accumulation-fusion" in problem
    (problem,) = _problems(given("1f1b"), global_batch_size=64)
    assert problem.startswith("--ext-pipeline-schedule: the plan in ")
    assert "is for 4 ranks and 8 micro-batches, this run has 4 and 16" in problem
    (problem,) = _problems(given("none"))
    assert problem.startswith("--ext-pipeline-schedule: ")
    assert "none.json: no plan can be read" in problem


def test_too_few_microbatches_names_megatrons_flags():
    given = ["--ext-pipeline-schedule=shifted_critical_path"]
    (problem,) = _problems(given, global_batch_size=8)
    assert problem == (
        "--ext-pipeline-schedule: schedule 'shifted_critical_path' needs at least 4 micro-batches per step; "
        "--global-batch-size 8 with --micro-batch-size 2 on 2 data-parallel ranks gives 2. Raise --global-batch-size "
        "to 16 or more, or use the schedule '1f1b'."
    )
    assert _problems(given, global_batch_size=16) == []
    (problem,) = _problems(given, rampup_batch_size=["4", "4", "100"])
    assert "--rampup-batch-size 4" in problem
    (problem,) = _problems(given, global_batch_size=None)
    assert "gives 1" in problem


def test_lists_that_do_not_fit_the_pipeline():
    (problem,) = _problems(["--ext-recompute-policy=2,2"])
    assert "2 numbers given, --pipeline-model-parallel-size is 4" in problem
    (problem,) = _problems(["--ext-recompute-memory-budget-gib=1,2"])
    assert problem.startswith("--ext-recompute-memory-budget-gib: 2 numbers given, the pipeline has 4 stages")
    (problem,) = _problems(["--ext-recompute-policy=5,5,0,0"])
    assert "10 recomputed layers asked, --num-layers is 8" in problem


def test_reading_flags_needs_neither_torch_nor_megatron():
    code = (
        "import sys; from ext.adapters.megatron import arguments, check\n"
        "arguments.read(['--ext-recompute-policy=1,2'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
