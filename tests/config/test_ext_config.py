"""The "ext" block: names, types and keys, everything wrong at once, the key as typed."""

import pickle

import pytest
from pydantic import ValidationError

from ext.config import ExtConfig, release
from ext.config.blocks import (
    MoeBlock,
    PipelineBlock,
    RecomputeBlock,
    TensorParallelBlock,
    TopologyBlock,
    TraceBlock,
)
from ext.core.errors import ConfigError
from ext.pipeline.schedule import SCHEDULES
from ext.recompute.policy import POLICIES

BLOCKS = {
    "": ExtConfig,
    "pipeline": PipelineBlock,
    "recompute": RecomputeBlock,
    "tensor_parallel": TensorParallelBlock,
    "moe": MoeBlock,
    "moe.topology": TopologyBlock,
    "trace": TraceBlock,
}


def read(block):
    return ExtConfig.from_ds_config({"train_batch_size": 8, "ext": block})


def problems(block):
    with pytest.raises(ConfigError) as caught:
        read(block)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


@pytest.fixture
def two_schedules_built(monkeypatch):
    """A fixed state of the table, so that texts stay the same when a feature is built."""
    schedules = {**dict.fromkeys(release.BUILT["pipeline.schedule"], False), "1f1b": True, "gpipe": True}
    monkeypatch.setitem(release.BUILT, "pipeline.schedule", schedules)


@pytest.fixture
def everything_built(monkeypatch):
    """The state after the last feature is built, so that values are looked at, not only their names."""
    built = {
        key: dict.fromkeys(entry, True) if isinstance(entry, dict) else True for key, entry in release.BUILT.items()
    }
    monkeypatch.setattr(release, "BUILT", built)


class TestOff:
    @pytest.mark.parametrize(
        "config", [{}, {"ext": None}, {"ext": {"enabled": False}}, {"ext": {"enabled": {"type": False}}}]
    )
    def test_is_none(self, config):
        assert ExtConfig.from_ds_config(config) is None

    def test_an_off_block_is_not_read(self):
        assert read({"enabled": False, "pipelin": {"schedule": "nonsense"}}) is None

    @pytest.mark.parametrize("value", ["false", 0, 1, [], {}])
    def test_only_booleans_switch(self, value):
        (text,) = problems({"enabled": value})
        assert text.startswith("ext.enabled: found ")
        assert text.endswith("; allowed: true or false.")

    def test_an_empty_block_is_on_and_asks_for_nothing(self):
        config = read({})
        assert (config.pipeline, config.recompute, config.moe, config.trace) == (None, None, None, None)
        assert not config.needs_pipeline_model


class TestAccess:
    def test_normalised(self):
        config = read({"pipeline": {"schedule": "gpipe"}, "recompute": {"policy": [2, 1, 0]}})
        assert config.pipeline.schedule == SCHEDULES.get("gpipe").Config()
        assert config.pipeline.partition.type == "module"
        assert config.recompute.policy == POLICIES.get("per_stage").Config(layers=(2, 1, 0))
        assert config.needs_pipeline_model

    def test_schedule_defaults_to_1f1b(self):
        assert read({"pipeline": {}}).pipeline.schedule.type == "1f1b"

    @pytest.mark.parametrize("block", [{"pipeline": {}}, {"recompute": {"policy": "none"}}, {"trace": {"path": "t"}}])
    def test_needs_pipeline_model(self, block):
        assert read(block).needs_pipeline_model

    def test_objects_carry_options(self):
        block = {
            "pipeline": {"schedule": {"type": "shifted_critical_path", "extra_forwards": 2}},
            "recompute": {"policy": {"type": "per_stage", "layers": [1, 0]}},
        }
        config = read(block)
        assert config.pipeline.schedule.extra_forwards == 2
        assert config.recompute.policy.layers == (1, 0)

    def test_every_value_may_be_an_object(self, everything_built):
        block = {
            "enabled": {"type": True},
            "pipeline": {"schedule": {"type": "1f1b"}, "partition": {"type": "module"}, "tolerance": {"type": 0.1}},
            "recompute": {
                "policy": {"type": "full"},
                "memory_budget_gib": {"type": [1, 2.5]},
                "overlap": {"type": False},
            },
            "tensor_parallel": {"sub_pipeline": {"type": 2}},
            "moe": {"dispatcher": {"type": "auto"}, "parallelism": {"type": "auto"}, "pipeline_degree": {"type": 2}},
            "watchdog": {"type": 30},
            "self_check": {"type": True},
        }
        plain = {
            "pipeline": {"schedule": "1f1b", "partition": "module", "tolerance": 0.1},
            "recompute": {"policy": "full", "memory_budget_gib": [1, 2.5], "overlap": False},
            "tensor_parallel": {"sub_pipeline": 2},
            "moe": {"dispatcher": "auto", "parallelism": "auto", "pipeline_degree": 2},
            "watchdog": 30,
            "self_check": True,
        }
        assert read(block) == read({"enabled": True, **plain})

    def test_own_schedule_keeps_its_path(self):
        path = "ext.pipeline.schedules.gpipe:GPipe"
        config = read({"pipeline": {"schedule": path}})
        assert config.pipeline.schedule.type == path
        assert SCHEDULES.get(config.pipeline.schedule.type) is SCHEDULES.get("gpipe")

    def test_frozen(self):
        with pytest.raises(ValidationError):
            read({"pipeline": {}}).pipeline.tolerance = 0.5  # type: ignore[union-attr]

    def test_dump_is_read_back(self, everything_built):
        config = read(
            {
                "pipeline": {"schedule": {"type": "shifted_critical_path", "extra_forwards": 2}, "partition": [4, 4]},
                "recompute": {"policy": [1, 0], "memory_budget_gib": 60},
                "moe": {"topology": {"ranks_per_node": 8}},
                "trace": {"path": "t.json", "steps": [1, 2]},
            }
        )
        assert read(config.model_dump(mode="json")) == config

    def test_dump_of_todays_features_is_read_back(self):
        config = read({"pipeline": {"schedule": "gpipe"}, "recompute": {"policy": [1, 0]}})
        assert read(config.model_dump(mode="json")) == config

    def test_pickles(self):
        config = read({"pipeline": {"schedule": "gpipe"}})
        assert pickle.loads(pickle.dumps(config)) == config

    def test_null_is_absent(self):
        assert read({"pipeline": None, "recompute": None, "watchdog": None}) == read({})
        assert problems({"pipelin": None}) != []

    def test_from_block_names_its_source(self):
        with pytest.raises(ConfigError, match=r"^--ext-config\.pipelin: unknown key"):
            ExtConfig.from_block({"pipelin": {}}, prefix="--ext-config")


class TestUnknownKeys:
    def test_all_at_once_with_the_nearest(self):
        block = {"pipelin": {}, "pipeline": {"schedul": "1f1b"}, "recompute": {"polcy": "full"}}
        assert problems(block) == [
            "ext.pipeline.schedul: unknown key. Did you mean 'schedule'? Allowed: schedule, partition, tolerance.",
            "ext.recompute.polcy: unknown key. Did you mean 'policy'? Allowed: policy, memory_budget_gib, overlap.",
            "ext.pipelin: unknown key. Did you mean 'pipeline'? Allowed: enabled, pipeline, recompute, "
            "tensor_parallel, moe, trace, watchdog, self_check.",
        ]

    def test_right_key_in_the_wrong_place(self):
        (text,) = problems({"schedule": "gpipe"})
        assert text.startswith("ext.schedule: unknown key. Did you mean 'pipeline.schedule'? Allowed: ")

    def test_case_does_not_matter_to_the_hint(self):
        (text,) = problems({"MOE": {}})
        assert "Did you mean 'moe'?" in text

    def test_no_hint_without_a_near_key(self):
        (text,) = problems({"zzzz": 1})
        assert text.startswith("ext.zzzz: unknown key. Allowed: enabled, ")

    def test_a_key_without_a_character(self):
        (text,) = problems({"": 1})
        assert text.startswith('ext."": unknown key. Allowed: ')

    def test_keys_that_are_no_text(self):
        (text,) = problems({1: 2})
        assert text.startswith("ext.1: unknown key.")

    def test_options_of_a_schedule(self):
        (text,) = problems({"pipeline": {"schedule": {"type": "shifted_critical_path", "extra_forward": 1}}})
        assert text == (
            "ext.pipeline.schedule.extra_forward: unknown key. Did you mean 'extra_forwards'? "
            "Allowed: type, extra_forwards."
        )

    def test_options_of_a_value_that_has_none(self):
        (text,) = problems({"enabled": {"type": True, "why": "x"}})
        assert text == "ext.enabled.why: unknown key. Allowed: type."

    def test_nested_blocks(self):
        (text,) = problems({"moe": {"topology": {"ranks_per_nod": 8}}})
        assert text.startswith("ext.moe.topology.ranks_per_nod: unknown key. Did you mean 'ranks_per_node'?")

    @pytest.mark.parametrize("key", ["Ext", "EXT", "exts", " ext"])
    def test_misspelt_block(self, key):
        with pytest.raises(ConfigError) as caught:
            ExtConfig.from_ds_config({key: {"pipeline": {}}})
        assert str(caught.value) == f"{key}: unknown key, ignored by DeepSpeed. Did you mean 'ext'?"

    @pytest.mark.parametrize(
        ("config", "key", "meant"),
        [
            ({"ext_pipeline": {}}, "ext_pipeline", "ext.pipeline"),
            ({"ext.pipeline.schedule": "gpipe"}, "ext.pipeline.schedule", "ext.pipeline.schedule"),
            ({"ext-recompute": {}}, "ext-recompute", "ext.recompute"),
            ({"pipeline": {"schedule": "gpipe"}}, "pipeline.schedule", "ext.pipeline.schedule"),
        ],
    )
    def test_misplaced_block(self, config, key, meant):
        with pytest.raises(ConfigError) as caught:
            ExtConfig.from_ds_config(config)
        assert str(caught.value) == f"{key}: unknown key, ignored by DeepSpeed. Did you mean '{meant}'?"

    @pytest.mark.parametrize("key", ["extra", "extension", "ext_ra", "extensions", "text", "expert_parallel"])
    def test_other_keys_are_left_alone(self, key):
        assert ExtConfig.from_ds_config({key: {}}) is None


class TestNames:
    def test_typo(self, two_schedules_built):
        (text,) = problems({"pipeline": {"schedule": "shifted_critcal_path"}})
        assert text == (
            "ext.pipeline.schedule: unknown schedule 'shifted_critcal_path'. Did you mean 'shifted_critical_path'? "
            "Allowed: '1f1b', 'gpipe'."
        )

    @pytest.mark.parametrize("name", ["auto", "plan_file", "zb_h1", "early_recompute"])
    def test_not_built_is_no_typo(self, two_schedules_built, name):
        text = f"ext.pipeline.schedule: '{name}' is not built in this release (0.1.0). Allowed: '1f1b', 'gpipe'."
        assert problems({"pipeline": {"schedule": name}}) == [text]
        assert problems({"pipeline": {"schedule": {"type": name, "option": 1}}}) == [text]

    def test_lists_and_own_classes_are_built_or_not_like_names(self, two_schedules_built, monkeypatch):
        monkeypatch.setitem(release.BUILT, "pipeline.partition", {"module": True, "per_stage": False})
        assert problems({"pipeline": {"schedule": "pkg.mod:Mine", "partition": [1, 1]}}) == [
            "ext.pipeline.schedule: 'pkg.mod:Mine' is not built in this release (0.1.0). Allowed: '1f1b', 'gpipe'.",
            "ext.pipeline.partition: a list is not built in this release (0.1.0). Allowed: 'module'.",
        ]

    def test_several(self):
        texts = problems(
            {
                "pipeline": {"schedule": "1f2b", "partition": "unifrom"},
                "recompute": {"policy": "lynx_hue"},
                "moe": {"dispatcher": "liner"},
            }
        )
        assert [text.partition(" Allowed")[0] for text in texts] == [
            "ext.pipeline.schedule: unknown schedule '1f2b'. Did you mean '1f1b'?",
            "ext.pipeline.partition: unknown partition 'unifrom'. Did you mean 'uniform'?",
            "ext.recompute.policy: unknown policy 'lynx_hue'. Did you mean 'lynx_heu'?",
            "ext.moe.dispatcher: unknown dispatcher 'liner'. Did you mean 'linear'?",
        ]

    @pytest.mark.parametrize("value", [5, 1.5, True, {}, {"typ": "1f1b"}, {"type": 3}, {"type": None}])
    def test_no_name(self, two_schedules_built, value):
        (text,) = problems({"pipeline": {"schedule": value}})
        assert text.startswith("ext.pipeline.schedule: found ")
        assert "allowed: '1f1b', 'gpipe', or an object with one of these names as 'type' and its options." in text

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("nowhere.at_all:X", "cannot be imported: No module named 'nowhere'"),
            ("os:path", "is no subclass of Schedule"),
            ("os:nothing", "cannot be imported: module 'os' has no attribute 'nothing'"),
            (":X", "cannot be imported: Empty module name"),
            (".relative:X", "cannot be imported: the 'package' argument is required"),
        ],
    )
    def test_import_path(self, path, reason):
        (text,) = problems({"pipeline": {"schedule": path}})
        assert text.startswith(f"ext.pipeline.schedule: schedule '{path}' {reason}")

    def test_a_module_that_breaks_on_import(self, tmp_path, monkeypatch):
        (tmp_path / "broken_schedule.py").write_text("1 / 0\n")
        monkeypatch.syspath_prepend(tmp_path)
        (text,) = problems({"pipeline": {"schedule": "broken_schedule:X"}})
        assert text.endswith("'broken_schedule:X' cannot be imported: division by zero")

    def test_a_schedule_registered_by_the_user(self, monkeypatch):
        gpipe = SCHEDULES.get("gpipe")
        monkeypatch.setitem(SCHEDULES._classes, "mine", gpipe)
        with pytest.raises(ConfigError, match=r"unknown schedule 'nime'.*'mine'"):
            read({"pipeline": {"schedule": "nime"}})


class TestNotBuilt:
    def test_a_key_as_a_whole(self, monkeypatch):
        monkeypatch.setitem(release.BUILT, "pipeline.tolerance", False)
        monkeypatch.setitem(release.BUILT, "watchdog", False)
        assert problems({"pipeline": {"tolerance": 0.5}, "watchdog": 60}) == [
            "ext.pipeline.tolerance: not built in this release (0.1.0). Remove the key.",
            "ext.watchdog: not built in this release (0.1.0). Remove the key.",
        ]

    def test_a_default_asks_for_nothing(self, monkeypatch):
        monkeypatch.setitem(release.BUILT, "pipeline.tolerance", False)
        monkeypatch.setitem(release.BUILT, "self_check", False)
        assert read({"pipeline": {"tolerance": 0.02}, "self_check": False}) is not None
        assert problems({"self_check": 0}) == ["ext.self_check: not built in this release (0.1.0). Remove the key."]

    def test_built_schedules_and_policies_exist(self):
        plain = ("per_stage", release.OWN)
        for key, registry in (("pipeline.schedule", SCHEDULES), ("recompute.policy", POLICIES)):
            names = [name for name, built in release.BUILT[key].items() if built and name not in plain]
            assert [name for name in names if name not in registry] == []

    def test_table_and_models_name_the_same_keys(self):
        leaves = {f"{path}.{name}".lstrip(".") for path, block in BLOCKS.items() for name in block.model_fields}
        assert leaves - set(BLOCKS) == set(release.BUILT)
        assert {path: block.where for path, block in BLOCKS.items() if path} == {
            path: f"{path}." for path in BLOCKS if path
        }

    def test_every_key_has_its_help(self):
        assert all(field.description for block in BLOCKS.values() for field in block.model_fields.values())


class TestValues:
    @pytest.mark.parametrize("block", [[], "1f1b", 3, True, 0.5])
    def test_no_object(self, block):
        (text,) = problems(block)
        assert text.startswith("ext: found ")
        assert "; allowed: an object with the keys enabled, pipeline, recompute, " in text
        (text,) = problems({"pipeline": block})
        assert text.startswith("ext.pipeline: found ")
        assert text.endswith("; allowed: an object with the keys schedule, partition, tolerance.")

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ([], "[]"),
            ([1, -1], "[1, -1]"),
            ([True, 1], "[true, 1]"),
            ([1.0], "[1.0]"),
            (["1"], '["1"]'),
            ([[1]], "[[1]]"),
        ],
    )
    def test_recompute_lists(self, value, shown):
        (text,) = problems({"recompute": {"policy": value}})
        assert text.startswith(f"ext.recompute.policy: found {shown}; allowed: ")

    def test_policy_is_needed(self):
        assert problems({"recompute": {}}) == [
            "ext.recompute.policy: missing. Allowed: the name of a policy or a list of recomputed layers, "
            "one number per stage."
        ]

    def test_a_budget_alone_means_stage_aware(self):
        for policy in ({}, {"policy": None}):
            config = ExtConfig.from_block({"recompute": {"memory_budget_gib": 60, **policy}})
            assert config.recompute.policy.type == "stage_aware"
        assert problems({"recompute": {"memory_budget_gib": 60, "polcy": "full"}}) == [
            "ext.recompute.polcy: unknown key. Did you mean 'policy'? Allowed: policy, memory_budget_gib, overlap."
        ]

    def test_option_of_the_wrong_type(self):
        for value in (1.0, "1", True, -1, float("nan")):
            (text,) = problems({"pipeline": {"schedule": {"type": "shifted_critical_path", "extra_forwards": value}}})
            assert text.startswith("ext.pipeline.schedule.extra_forwards: found ")

    @pytest.mark.parametrize(
        ("path", "good", "bad"),
        [
            ("pipeline.tolerance", [0, 0.5], [1, -0.1, "0.1", True, float("nan"), [0.1]]),
            (
                "pipeline.partition",
                ["uniform", [3, 1]],
                [[], [0, 1], [1.0], [True], 3, {"type": "uniform", "layers": [1]}],
            ),
            (
                "recompute.memory_budget_gib",
                [60, 0.5, [1, 2]],
                [0, -1, True, "60", [], [1, -1], float("inf"), float("nan")],
            ),
            ("recompute.overlap", [True, False], [0, "true", []]),
            ("tensor_parallel.sub_pipeline", [1, 2], [0, 3, True, 1.0, "1"]),
            (
                "moe.dispatcher",
                [
                    "linear",
                    "auto",
                    {"type": "hierarchical", "order": "node_first"},
                    {"type": "auto", "probe_seconds": 1},
                ],
                [
                    1,
                    "rail",
                    ["linear"],
                    {"type": "linear", "order": "node_first"},
                    {"type": "auto", "probe_seconds": 0},
                ],
            ),
            (
                "moe.router",
                [{}, {"priority": "batch", "z_loss": 0.001}, {"loss": "none", "bias_rate": 0.01}],
                [3, "host", {"priority": "bath"}, {"z_loss": -1}, {"aux_loss_weight": "1"}],
            ),
            ("moe.parallelism", [1, 4, "auto"], [0, -1, 1.0, True, "4", []]),
            ("moe.pipeline_degree", [2, "auto"], [0, "two", None.__class__]),
            ("moe.topology", [{}, {"ranks_per_node": 8}], [8, {"ranks_per_node": 0}, {"ranks_per_node": "8"}, []]),
            ("trace", [{"path": "t.json"}], [{}, "t.json", {"path": ""}, {"path": 3}]),
            ("trace.steps", [[3, 5], [0, 0]], [[5, 3], [1], [1, 2, 3], [-1, 2], 3, [True, 2], [1.0, 2], "3-5"]),
            ("watchdog", [60, 0.5], [0, -1, True, "60", float("inf"), float("nan")]),
            ("self_check", [True, False], ["yes", 1]),
        ],
    )
    def test_of_every_key(self, everything_built, path, good, bad):
        needed = {"recompute": {"policy": "none"}, "trace": {"path": "t.json"}}

        def block_with(value):
            first, _, rest = path.partition(".")
            return {first: {**needed.get(first, {}), rest: value}} if rest else {first: value}

        for value in good:
            assert read(block_with(value)) is not None
        for value in bad:
            texts = problems(block_with(value))
            assert len(texts) == 1, texts
            assert texts[0].startswith(f"ext.{path}")

    def test_text_of_a_wrong_value(self, everything_built):
        assert problems(
            {"recompute": {"policy": "none", "memory_budget_gib": [60, -2]}, "trace": {"path": "t", "steps": [5, 3]}}
        ) == [
            "ext.recompute.memory_budget_gib: found [60, -2]; allowed: a number above 0, or a list of such numbers, "
            "one per stage.",
            "ext.trace.steps: found [5, 3]; the first step is after the last. Swap them.",
        ]

    def test_junk_is_cut_short(self):
        for junk in ("x" * 100_000, list(range(100_000)), {"a": {"b": ["c"] * 1000}}):
            for text in problems({"pipeline": junk, "recompute": {"policy": junk}}):
                assert len(text) < 600

    def test_endless_nesting(self):
        endless = {}
        endless["type"] = endless
        (text,) = problems({"pipeline": {"schedule": endless}})
        assert text.startswith("ext.pipeline.schedule: found {'type': {'type': ")
