"""What can be known before launch: batch arithmetic, micro-batches, layouts, lists, ZeRO; no stock key is flagged."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ext.config import Problem, check_config, release
from ext.config.batch import Batch
from ext.config.check import Launch, microbatches_per_step

TERMS = "train_micro_batch_size_per_gpu x gradient_accumulation_steps x data parallel"


def check(config, **launch):
    return [str(problem) for problem in check_config(config, **launch)]


def schedule(name, **config):
    return {"ext": {"pipeline": {"schedule": name}}, **config}


@pytest.fixture
def everything_built(monkeypatch):
    built = {
        key: dict.fromkeys(entry, True) if isinstance(entry, dict) else True for key, entry in release.BUILT.items()
    }
    monkeypatch.setattr(release, "BUILT", built)


class TestBatch:
    LAUNCH = {"world_size": 8, "pipeline_stages": 2, "tensor_parallel": 2}
    DP = f"({TERMS}; 8 ranks / (2 stages x 2 tensor parallel) = 2)"

    def test_64_is_8_micro_batches(self):
        config = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 64}
        assert check(config, **self.LAUNCH) == []
        assert microbatches_per_step(config, Launch(**self.LAUNCH)) == 8

    def test_60_is_refused_with_its_neighbours(self):
        config = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 60}
        assert check(config, **self.LAUNCH) == [
            f"train_batch_size: 60 != 4 x GAS x 2 for any whole GAS {self.DP}. "
            "Nearest legal: 56 (GAS 7) and 64 (GAS 8)."
        ]

    @pytest.mark.parametrize(
        ("train", "micro", "gas", "text"),
        [
            (64, 4, 8, None),
            (64, None, None, None),
            (None, 4, 8, None),
            (None, None, 3, None),
            (None, None, None, None),
            (64, 4, 4, "64 != 4 x 4 x 2 = 32 {dp}. Set train_batch_size to 32 or gradient_accumulation_steps to 8 or "
                "train_micro_batch_size_per_gpu to 8."),
            (60, 4, 8, "60 != 4 x 8 x 2 = 64 {dp}. Set train_batch_size to 64."),
            (60, None, 8, "60 != micro-batch x 8 x 2 for any whole micro-batch {dp}. "
                "Nearest legal: 48 (micro-batch 3) and 64 (micro-batch 4)."),
            (63, None, None, "63 != micro-batch x GAS x 2 for any whole micro-batch and GAS {dp}. "
                "Nearest legal: 62 and 64."),
            (3, 4, None, "3 != 4 x GAS x 2 for any whole GAS {dp}. Nearest legal: 8 (GAS 1)."),
        ],
    )  # fmt: skip
    def test_with_a_known_layout(self, train, micro, gas, text):
        config = {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": gas,
        }
        expected = [] if text is None else [f"train_batch_size: {text.format(dp=self.DP)}"]
        assert check(config, **self.LAUNCH) == expected
        assert check({k: v for k, v in config.items() if v is not None}, **self.LAUNCH) == expected

    @pytest.mark.parametrize(
        ("train", "micro", "gas", "text"),
        [
            (60, 4, None, None),
            (
                60,
                None,
                7,
                "60 != micro-batch x 7 x dp for any whole micro-batch and dp ({terms}). Nearest legal: 56 and 63.",
            ),
            (60, 4, 8, "60 != 4 x 8 x dp for any whole dp ({terms}). Nearest legal: 32 (dp 1) and 64 (dp 2)."),
            (64, 4, 8, None),
            (63, None, None, None),
        ],
    )
    @pytest.mark.parametrize("launch", [{}, {"world_size": 8}, {"pipeline_stages": 2}, {"tensor_parallel": 2}])
    def test_what_depends_on_an_absent_number_is_skipped(self, train, micro, gas, text, launch):
        config = {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": gas,
        }
        assert check(config, **launch) == ([] if text is None else [f"train_batch_size: {text.format(terms=TERMS)}"])

    def test_sequence_parallel_changes_the_count_so_it_is_skipped(self):
        config = {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2}
        assert check(config, **self.LAUNCH) == []

    @pytest.mark.parametrize("value", [0, -4, 4.0, 4.5, "4", True, [4], {}, float("nan")])
    @pytest.mark.parametrize(
        "key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    )
    def test_numbers(self, key, value):
        (text,) = check({key: value}, **self.LAUNCH)
        assert text.startswith(f"{key}: found ")
        assert text.endswith("; allowed: a whole number above 0.")

    def test_auto_is_filled_in_by_others(self):
        auto = dict.fromkeys(
            ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto"
        )
        assert check(schedule("shifted_critical_path", **auto), **self.LAUNCH) == []
        assert check(schedule("shifted_critical_path", train_micro_batch_size_per_gpu=1, train_batch_size="auto")) == []

    @pytest.mark.parametrize(
        ("given", "dp", "completed"),
        [
            ((64, 4, None), 2, (64, 4, 8)),
            ((64, None, 8), 2, (64, 4, 8)),
            ((None, 4, 8), 2, (64, 4, 8)),
            ((64, None, None), 2, (64, 32, 1)),
            ((None, 4, None), 2, (8, 4, 1)),
            ((None, None, 8), 2, (None, None, 8)),
            ((64, 4, None), None, (64, 4, None)),
            ((None, 4, None), None, (None, 4, 1)),
            ((None, 4, 8), None, (None, 4, 8)),
        ],
    )
    def test_completion_is_deepspeeds(self, given, dp, completed):
        assert Batch(*given).completed(dp) == Batch(*completed)


class TestMicrobatches:
    @pytest.mark.parametrize("given", [1, 2, 3])
    @pytest.mark.parametrize("launch", [{"pipeline_stages": 4}, {}, {"pipeline_stages": 2, "world_size": 4}])
    def test_too_few(self, given, launch):
        config = schedule("shifted_critical_path", train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=given)
        assert check(config, **launch) == [
            "ext.pipeline.schedule: schedule 'shifted_critical_path' needs at least 4 micro-batches per step, "
            f"gradient_accumulation_steps gives {given}. Raise gradient_accumulation_steps to 4 or more, or use the "
            "schedule '1f1b'."
        ]

    @pytest.mark.parametrize("given", [4, 5, 16])
    @pytest.mark.parametrize("stages", [2, 4, 8])
    def test_enough(self, given, stages):
        config = schedule("shifted_critical_path", train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=given)
        assert check(config, pipeline_stages=stages) == []

    def test_the_number_that_deepspeed_would_compute(self):
        config = schedule("shifted_critical_path", train_micro_batch_size_per_gpu=1, train_batch_size=6)
        (text,) = check(config, world_size=8, pipeline_stages=4)
        assert "gradient_accumulation_steps gives 3." in text
        (text,) = check(schedule("shifted_critical_path", train_micro_batch_size_per_gpu=1))
        assert "gradient_accumulation_steps gives 1." in text

    def test_unknown_number_is_skipped(self):
        assert check(schedule("shifted_critical_path", train_batch_size=6, train_micro_batch_size_per_gpu=1)) == []
        assert check(schedule("shifted_critical_path")) == []

    def test_an_off_block_needs_none(self):
        off = {"enabled": False, "pipeline": {"schedule": "shifted_critical_path"}}
        assert check({"ext": off, "gradient_accumulation_steps": 1}, pipeline_stages=4) == []


class TestLayout:
    def test_world_size(self):
        assert check({}, world_size=7, pipeline_stages=3, tensor_parallel=2) == [
            "world_size: 7 ranks cannot be cut into replicas of 3 pipeline stages x 2 tensor-parallel ranks = 6. "
            "Use 6 or 12 ranks."
        ]
        assert check({}, world_size=2, pipeline_stages=4)[0].endswith("Use 4 ranks.")
        assert check({}, world_size=12, pipeline_stages=3, tensor_parallel=2) == []

    def test_fewer_layers_than_stages(self):
        assert check({}, pipeline_stages=8, num_layers=5) == [
            "num_layers: 5 layers cannot fill 8 pipeline stages of at least one. Use 5 stages or fewer."
        ]

    @pytest.mark.parametrize(("layers", "stages"), [(30, 4), (20, 8), (80, 16), (4, 4)])
    def test_uneven_layouts_are_fine(self, layers, stages):
        assert check(schedule("1f1b"), pipeline_stages=stages, num_layers=layers) == []

    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
    @pytest.mark.parametrize("name", ["world_size", "pipeline_stages", "tensor_parallel", "num_layers"])
    def test_numbers(self, name, value):
        assert [problem.key for problem in check_config({}, **{name: value})] == [name]


class TestLists:
    def test_layers_lost_in_silence(self, everything_built):
        config = {"ext": {"pipeline": {"partition": [7, 7, 7, 7]}}}
        assert check(config, pipeline_stages=4, num_layers=30) == [
            "ext.pipeline.partition: 7 + 7 + 7 + 7 = 28 layers, the model has 30. Make the sum 30."
        ]
        assert check({"ext": {"pipeline": {"partition": [8, 8, 7, 7]}}}, pipeline_stages=4, num_layers=30) == []

    def test_one_number_per_stage(self, everything_built):
        block = {
            "pipeline": {"partition": [4, 4]},
            "recompute": {"policy": [1, 1, 1], "memory_budget_gib": [60, 60, 60, 60]},
        }
        assert check({"ext": block}, pipeline_stages=3) == [
            "ext.pipeline.partition: 2 numbers given, the pipeline has 3 stages. Give one per stage.",
            "ext.recompute.memory_budget_gib: 4 numbers given, the pipeline has 3 stages. Give one per stage.",
        ]
        assert check({"ext": block}) == [
            "ext.recompute.policy: 3 numbers given, ext.pipeline.partition has 2. Both need one per stage.",
            "ext.recompute.memory_budget_gib: 4 numbers given, ext.pipeline.partition has 2. Both need one per stage.",
        ]

    def test_more_recomputed_layers_than_there_are(self, everything_built):
        recompute = {"policy": [2, 3]}
        assert check({"ext": {"recompute": recompute, "pipeline": {"partition": [2, 2]}}}) == [
            "ext.recompute.policy: stage 1: 3 recomputed layers asked, the stage has 2 at most. Lower it."
        ]
        assert check({"ext": {"recompute": recompute}}, pipeline_stages=2, num_layers=4) == [
            "ext.recompute.policy: 5 recomputed layers asked in all, the model has 4. Lower them."
        ]
        assert check({"ext": {"recompute": {"policy": [4, 0]}}}, pipeline_stages=2, num_layers=4) == [
            "ext.recompute.policy: stage 0: 4 recomputed layers asked, the stage has 3 at most. Lower it."
        ]
        assert check({"ext": {"recompute": recompute}}, pipeline_stages=2) == []


class TestZero:
    ALTERNATIVES = (
        "cannot work with a pipeline: it would shard gradients that every micro-batch adds to. Allowed: 0 or 1. "
        "Use ZeRO 1 with more pipeline stages or recomputation, or ZeRO 3 without a pipeline."
    )

    @pytest.mark.parametrize("stage", [2, 3])
    def test_refused_with_a_pipeline(self, stage):
        zero = {"zero_optimization": {"stage": stage}}
        expected = [f"zero_optimization.stage: ZeRO {stage} {self.ALTERNATIVES}"]
        assert check({**schedule("1f1b"), **zero}) == expected
        assert check({"ext": {"recompute": {"policy": "full"}}, **zero}) == expected
        assert check(zero, pipeline_stages=2) == expected

    @pytest.mark.parametrize("stage", [0, 1, "auto", None])
    def test_fine_with_a_pipeline(self, stage):
        assert check(schedule("1f1b", zero_optimization={"stage": stage}), pipeline_stages=2) == []

    def test_fine_without_a_pipeline(self):
        for block in ({}, {"ext": {}}, {"ext": {"enabled": False, "pipeline": {}}}):
            assert check({**block, "zero_optimization": {"stage": 3}}, pipeline_stages=1, world_size=8) == []

    def test_two_precisions(self):
        on = {"enabled": True}
        assert check({"fp16": on, "bf16": on}) == ["fp16.enabled: both fp16 and bf16 are enabled. Disable one."]
        assert check({"fp16": {"enabled": False}, "bf16": on}) == []

    def test_fp16_goes_with_stock_schedules_only(self):
        on, block = {"enabled": True}, {"pipeline": {"schedule": "1f1b"}}
        assert check({"fp16": on}) == []
        assert check({"fp16": on, "ext": {**block, "enabled": False}}) == []
        (problem,) = check({"fp16": on, "ext": block})
        assert problem.startswith("fp16.enabled: loss scaling")
        assert "bf16" in problem


def test_what_goes_with_a_unit_policy():
    assert check({"ext": {"recompute": {"policy": "lynx_heu", "memory_budget_gib": 1, "overlap": False}}}) == []
    (problem,) = check({"ext": {"recompute": {"policy": "full", "overlap": True}}})
    assert problem.startswith("ext.recompute.overlap: goes with the policies 'lynx_heu' and 'lynx_opt', found 'full'")
    for overlap in ({}, {"overlap": False}):
        block = {"pipeline": {"schedule": "auto"}, "recompute": {"policy": "lynx_opt", **overlap}}
        assert check({"ext": block}) == []


def test_unit_tables_of_a_plan_file_are_looked_at_before_launch(tmp_path):
    path = tmp_path / "plan.json"
    orders = {"0": "0F0 0B0", "1": "1F0 1B0"}
    counts = {"rank_of": [0, 1], "layers_per_stage": [1, 1], "recomputed_layers": [0, 0]}
    plan = {"format": 1, "num_microbatches": 1, **counts, "orders": orders}
    block = {"pipeline": {"schedule": {"type": "plan_file", "path": str(path)}}}
    path.write_text(json.dumps(plan))
    assert check({"ext": block}) == []
    path.write_text(json.dumps({**plan, "unit_tables": [[{}], [{"norm": "C"}]]}))
    (problem,) = check({"ext": block})
    assert problem.startswith(f"ext.pipeline.schedule: {path}: units: no costs can be read for the unit tables")


def test_everything_at_once(everything_built):
    config = {
        "train_batch_size": 60,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "Ext": {},
        "ext": {
            "pipelin": {},
            "pipeline": {"schedule": "shifted_critical_path", "partition": [1, 2, 3], "tolerence": 0.1},
            "recompute": {"policy": "fulll", "memory_budget_gib": [1, 2]},
        },
    }
    found = check_config(config, world_size=6, pipeline_stages=4, tensor_parallel=1, num_layers=3)
    assert [problem.key for problem in found] == [
        "Ext",
        "ext.pipeline.tolerence",
        "ext.recompute.policy",
        "ext.pipelin",
        "world_size",
        "num_layers",
        "train_batch_size",
        "zero_optimization.stage",
        "ext.pipeline.schedule",
        "ext.pipeline.partition",
        "ext.recompute.memory_budget_gib",
        "ext.pipeline.partition",
    ]


def test_unreadable_is_one_problem(tmp_path):
    path = tmp_path / "ds: config.json"
    path.write_text('{"a": 1')
    assert check_config(path) == [Problem(str(path), "line 1, column 8: Expecting ',' delimiter.")]
    assert check_config(None) != []  # type: ignore[arg-type]


# Configurations as people use them with DeepSpeed 0.19.8, every documented top-level key among them.
REALISTIC = [
    {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 10,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "x"},
        "wandb": {"enabled": False, "project": "x"},
        "csv_monitor": {"enabled": True, "output_path": "runs"},
        "comet": {"enabled": False},
        "monitor_config": {},
    },
    {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "nvme", "nvme_path": "/local"},
            "stage3_prefetch_bucket_size": "auto",
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    },
    {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "pipeline": {
            "stages": "auto",
            "partition": "best",
            "seed_layers": False,
            "activation_checkpoint_interval": 0,
            "pipe_partitioned": True,
            "grad_partitioned": True,
            "use_reentrant": False,
        },
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": 4,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "communication_data_type": "bf16",
        "seq_parallel_communication_data_type": "fp32",
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "avg",
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
        "nebula": {"enabled": False},
        "datastates": {},
    },
    {
        "train_batch_size": 32,
        "tensor_parallel": {"autotp_size": 2},
        "expert_parallel": {"autoep_size": 2},
        "sequence_parallel_size": 2,
        "use_data_before_expert_parallelism": False,
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        "weight_quantization": {},
        "data_efficiency": {"enabled": True, "seed": 1, "data_routing": {}, "data_sampling": {}},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "autotuning": {"enabled": False},
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
        "compile": {"deepcompile": True},
        "timers": {"throughput": {"enabled": True}},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "disable_allgather": False,
        "disable_python_gc": False,
        "managed_gradient_accumulation": False,
        "dataloader_drop_last": True,
        "log_level": "info",
        "vocabulary_size": 50304,
        "zenflow": {},
        "amp": {"enabled": False, "opt_level": "O1"},
        "sparse_attention": {"mode": "fixed"},
        "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]},
        "curriculum_learning": {"enabled": False},
        "progressive_layer_drop": {"enabled": False},
        "eigenvalue": {"enabled": False},
        "sparse_gradients": False,
        "quantize_training": {},
        "my_own_key": {"deepspeed": "passes it in silence"},
    },
]


@pytest.mark.parametrize("config", REALISTIC)
def test_no_stock_key_is_flagged(config):
    assert check(config) == []
    assert check({**config, "ext": {}}) == []
    assert check(config, pipeline_stages=1, num_layers=12) == []


def test_no_name_in_deepspeeds_own_sources_is_flagged():
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    sources = [path for pattern in ("config*.py", "constants.py") for path in Path(spec.origin).parent.rglob(pattern)]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = set(re.findall(r"""["']([a-z][a-z0-9_]{2,40})["']""", text)) | set(
        re.findall(r"^    (\w+):", text, re.MULTILINE)
    )
    assert {"zero_optimization", "train_batch_size", "activation_checkpointing", "bf16", "tensor_parallel"} <= names
    assert len(names) > 500
    assert check(dict.fromkeys(names)) == []
    assert check({"pipeline": dict.fromkeys(names - {"schedule"})}) == []
