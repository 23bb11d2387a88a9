"""Memory per stage: predicted as measured, budgets kept, decisions that change nothing else, errors that help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ext
from ext.testing.ranks import RanksFailed, run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from memory_models import batch, cross_entropy, transformer

pytestmark = pytest.mark.dist

GAS = 6
KIB_IN_GIB = 2**-20


def _config(block: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": block,
        **keys,
    }


def _engine(layers: list[Any], config: dict[str, Any], num_stages: int, sample_batch: Any = None, **kwargs: Any) -> Any:
    module = PipelineModule(
        layers, num_stages=num_stages, loss_fn=cross_entropy, **{"partition_method": "uniform", **kwargs}
    )
    parameters = list(module.parameters())
    return ext.initialize(model=module, model_parameters=parameters, config=config, sample_batch=sample_batch)[0]


def _data(step: int, **shape: int) -> Any:
    return iter([batch(100 * step + i, **shape) for i in range(GAS)])


MODELS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "untied": ({}, {}, {}),
    "tied": ({"tied": True, "num_layers": 5}, {}, {}),
    "uneven": ({"ffn": (32, 512, 64, 256), "num_layers": 7, "dropout": 0.1}, {}, {}),
    "long_sequence": ({"num_layers": 4}, {"seq": 384}, {}),
    "bf16_zero1": (
        {"tied": True, "hidden": 64},
        {},
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 50_000}},
    ),
    "large_vocabulary": ({"vocab": 8192, "num_layers": 4}, {"vocab": 8192}, {"bf16": {"enabled": True}}),
}
BLOCKS = (
    {"pipeline": {"schedule": "1f1b"}},
    {"pipeline": {"schedule": "shifted_critical_path"}},
    {"pipeline": {"schedule": "early_recompute"}, "recompute": {"policy": [2, 1]}},
    {"pipeline": {"schedule": "gpipe"}, "recompute": {"policy": [1, 2]}},
)


def _predicted_and_measured(rank: int, world_size: int) -> list[tuple[str, Any, Any]]:
    deepspeed.init_distributed("gloo")
    results = []
    for index, (name, (model, shape, keys)) in enumerate(MODELS.items()):
        for block in (BLOCKS[index % len(BLOCKS)], BLOCKS[(index + 2) % len(BLOCKS)]):
            results.append(_counted(name, block, model, shape, keys, world_size))
    return results


def _counted(name: str, block: Any, model: Any, shape: Any, keys: Any, num_stages: int) -> tuple[str, Any, Any]:
    engine = _engine(transformer(**model), _config(block, **keys), num_stages)
    assert torch.isfinite(engine.train_batch(_data(0, **shape)))
    return name, block, ext.memory_report(engine)


def test_predicted_is_measured_on_real_models():
    results = run_ranks(_predicted_and_measured, 2, env={"EXT_MEMORY_REPORT": "1"}, timeout=150)
    assert len(results[0]) == 2 * len(MODELS)
    for name, block, rows in results[0]:
        assert [row.stage for row in rows] == [0, 1]
        for row in rows:
            # Far inside of 5 % of the whole: states hide no error of the activations.
            assert abs(row.measured - row.live) <= 0.01 * row.activations + 512, (name, block, row)
    assert [rows for _, _, rows in results[0]] == [rows for _, _, rows in results[1]]


WIDE = {
    "wide": ({"ffn": (1024,), "num_layers": 4}, {}, {}),
    "wider": ({"ffn": (2048, 32, 512), "hidden": 16, "num_layers": 5, "dropout": 0.1}, {"seq": 64}, {}),
}
SPLIT = {"schedule": "zb_h1"}
SPLIT_BLOCKS = (
    {"pipeline": SPLIT},
    {"pipeline": SPLIT, "recompute": {"policy": "full"}},
    {"pipeline": SPLIT, "recompute": {"policy": [1] * 2}},
)


def _split(rank: int, world_size: int, blocks: Any) -> list[tuple[str, Any, Any]]:
    deepspeed.init_distributed("gloo")
    return [
        _counted(name, block, model, shape, keys, world_size)
        for name, (model, shape, keys) in {**MODELS, **WIDE}.items()
        for block in blocks
    ]


@pytest.mark.parametrize(
    ("num_stages", "blocks"),
    [
        (2, SPLIT_BLOCKS[:1]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, SPLIT_BLOCKS[1:]), (3, SPLIT_BLOCKS[:2]))),
    ],
)
def test_predicted_is_measured_where_the_backward_is_split(num_stages, blocks):
    """Between I and W stay the inputs of the weights' products and the gradients of their outputs, and no more."""
    results = run_ranks(_split, num_stages, blocks, env={"EXT_MEMORY_REPORT": "1"}, timeout=150)
    assert len(results[0]) == len(blocks) * (len(MODELS) + len(WIDE))
    for name, block, rows in results[0]:
        for row in rows:
            # Far inside of 5 % of the whole. In bf16 without ZeRO, W frees what waits while it makes its gradients.
            most = 0.03 * row.live if name == "large_vocabulary" else 0.01 * row.activations + 512
            assert abs(row.measured - row.live) <= most, (name, block, row)


BUDGETS = {"1f1b": 1100, "shifted_critical_path": 1100, "early_recompute": 1100}


def _within_a_budget(rank: int, world_size: int) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    results: dict[str, Any] = {}
    for schedule, kib in BUDGETS.items():
        losses = {}
        for policy in ("none", "stage_aware"):
            budget = {"memory_budget_gib": kib * KIB_IN_GIB} if policy == "stage_aware" else {}
            block = {"pipeline": {"schedule": schedule}, "recompute": {"policy": policy, **budget}}
            torch.manual_seed(11)
            engine = _engine(transformer(10, dropout=0.2), _config(block), 4)
            losses[policy] = [engine.train_batch(_data(step)).item() for step in range(3)]
        description = ext.describe(engine)
        results[schedule] = losses, description["recomputes"], engine.plan.recomputed_layers, ext.memory_report(engine)
    return results


def test_a_real_run_within_a_budget_per_stage():
    """Stages differ, losses are those of no recomputation to the bit, and every stage keeps within the budget."""
    by_rank = run_ranks(_within_a_budget, 4, timeout=120)
    for schedule, kib in BUDGETS.items():
        for rank, results in enumerate(by_rank):
            losses, recomputes, planned, rows = results[schedule]
            assert losses["stage_aware"] == losses["none"]
            assert recomputes == {str(rank): planned[rank] * GAS}
            assert len(set(planned)) > 1
            assert planned[3] == 0
            assert all(row.measured <= kib * 1024 for row in rows), (schedule, rows)
            assert all(row.recomputed == count for row, count in zip(rows, planned, strict=True))


class Stumbling(nn.Module):
    """Runs out of memory when it has been called so many times, as a device would say it."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x + self.linear(x)


class Growing(nn.Module):
    """Keeps more for its backward every time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(10 * max(0, self.calls - 5)):
            x = torch.exp(torch.tanh(x)) - 1
        return self.linear(x)


def _failures(rank: int, world_size: int) -> dict[str, str]:
    deepspeed.init_distributed("gloo")
    texts = {}
    # Without recomputation the stages of the plain model need 1238 and 1038 KiB, with it 901 and 872.
    stage_aware = {"policy": "stage_aware", "memory_budget_gib": 1200 * KIB_IN_GIB}
    nothing = {"policy": [0, 0], "memory_budget_gib": [2000 * KIB_IN_GIB, 1000 * KIB_IN_GIB]}
    cases: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "impossible": (transformer(), {"recompute": {**stage_aware, "memory_budget_gib": [400 * KIB_IN_GIB, 1.0]}}),
        "fixed_policy": (transformer(), {"recompute": {"policy": "none", "memory_budget_gib": 1000 * KIB_IN_GIB}}),
        "no_budget_on_cpu": (transformer(), {"recompute": {"policy": "stage_aware"}}),
        "in_the_step": ([*transformer()[:-1], LayerSpec(Stumbling, 8), transformer()[-1]], {"recompute": stage_aware}),
        "without_prediction": ([*transformer()[:-1], LayerSpec(Stumbling, 3), transformer()[-1]], {"pipeline": {}}),
        "beyond_the_budget": ([*transformer()[:-1], LayerSpec(Growing), transformer()[-1]], {"recompute": nothing}),
        "built_before": (transformer(), {"pipeline": {"partition": "uniform"}}),
    }
    for name, (layers, block) in cases.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is compared
            _engine(layers, _config(block), 2).train_batch(_data(0))
        texts[name] = f"{type(caught.value).__name__}: {caught.value}"
    return texts


def test_errors_name_the_stage_and_a_change_that_fits():
    texts, others = run_ranks(_failures, 2, timeout=120)
    for name in texts:
        if name != "in_the_step":
            assert texts[name].splitlines()[0] == others[name].splitlines()[0], name
    assert "ext.recompute.memory_budget_gib: stage 0: needs at least" in texts["impossible"]
    assert "the budget is 400.000 KiB" in texts["impossible"]
    assert "Smallest budgets that schedule '1f1b' can keep, by stage: " in texts["impossible"]
    assert texts["impossible"].startswith("BudgetError: ")
    assert "stage 0 needs" in texts["fixed_policy"]
    assert "Nearest change that fits: ext.recompute.policy [" in texts["fixed_policy"]
    assert texts["no_budget_on_cpu"].startswith("ConfigError: ext.recompute.memory_budget_gib: missing.")
    for text in (texts["in_the_step"], others["in_the_step"]):
        assert text.startswith("OutOfMemoryError: stage 1 ran out of memory: ")
        assert "were predicted" in text
        assert "were measured, the budget is 1.172 MiB. Nearest change that fits: " in text
        assert "Tried to allocate 2.00 GiB" in text
    assert texts["without_prediction"].startswith("OutOfMemoryError: stage 1 ran out of memory: ")
    assert "EXT_MEMORY_REPORT=1" in texts["without_prediction"]
    assert texts["beyond_the_budget"].startswith("OutOfMemoryError: stage 1 held more than its budget: ")
    assert "places layers while the module is built" in texts["built_before"]


def _decisions(rank: int, world_size: int) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    results: dict[str, Any] = {}
    aware = {"policy": "stage_aware", "memory_budget_gib": 1000 * KIB_IN_GIB}
    for name, recompute, sample in (
        ("none", {"policy": "none"}, None),
        ("first_batch", aware, None),
        ("sample", aware, batch(0)),
    ):
        torch.manual_seed(3)
        engine = _engine(transformer(dropout=0.3), _config({"recompute": recompute}), 2, sample)
        before = engine.plan.recomputed_layers
        random = torch.get_rng_state()
        given = _data(0)
        losses = [engine.train_batch(given).item(), engine.train_batch(_data(1)).item()]
        weights = [p.detach().clone() for p in engine.module.parameters()]
        results[name] = before, engine.plan.recomputed_layers, losses, weights, len(list(given)), random
    return results


def test_deciding_consumes_no_data_and_changes_no_number():
    for results in run_ranks(_decisions, 2, timeout=90):
        none, first, sample = (results[name] for name in ("none", "first_batch", "sample"))
        assert first[0] == (4, 4)  # Everything, until the first train_batch decides.
        assert first[1] == sample[0] == sample[1]
        assert first[1][0] > first[1][1]
        for got in (first, sample):
            assert got[2] == none[2]
            assert all(torch.equal(a, b) for a, b in zip(got[3], none[3], strict=True))
            assert got[4] == 0
            assert torch.equal(got[5], none[5])


def _unusual_ways(rank: int, world_size: int) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    results: dict[str, Any] = {}
    aware = {"recompute": {"policy": "stage_aware", "memory_budget_gib": 1200 * KIB_IN_GIB}}
    engine = _engine(transformer(8), _config(aware), 2)
    engine.train_batch(_data(engine.grid.data_parallel_id))
    results["replicas"] = engine.plan.recomputed_layers, ext.memory_report(engine)

    engine = _engine(transformer(8), _config(aware), 4)
    engine.eval_batch(_data(7), num_micro_batches=4)
    waiting = engine.plan.recomputed_layers
    has_data = engine.is_first_stage() or engine.is_last_stage()
    engine.train_batch(_data(0) if has_data else None)
    first = engine.plan.recomputed_layers
    engine.set_train_batch_size(2 * 2)
    engine.train_batch(_data(1) if has_data else None)
    results["fewer_microbatches"] = waiting, first, engine.plan.recomputed_layers, ext.memory_report(engine)

    module = PipelineModule(transformer(6), num_stages=4, loss_fn=cross_entropy, partition_method="uniform")
    if engine.stage_id == 1:
        module.requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    engine = ext.initialize(model=module, model_parameters=trained, config=_config(aware))[0]
    engine.train_batch(_data(0))
    results["frozen"] = None, ext.memory_report(engine)
    return results


def test_replicas_evaluation_first_no_data_in_the_middle_and_frozen_stages():
    by_rank = run_ranks(_unusual_ways, 4, timeout=120)
    results = by_rank[0]
    assert results["replicas"][0][0] > 0
    waiting, first, fewer, rows = results["fewer_microbatches"]
    assert waiting == (3, 3, 2, 2)
    assert first[0] > 0
    assert sum(fewer) < sum(first)
    assert [row.in_flight for row in rows] == [2, 2, 2, 1]
    for name in ("replicas", "frozen"):
        for row in results[name][1]:
            assert abs(row.measured - row.live) <= 0.01 * row.activations + 512, (name, row)
    assert results["frozen"][1][1].states.gradients == 0
    for other in by_rank[1:]:
        assert other["fewer_microbatches"] == results["fewer_microbatches"]


def test_a_short_iterator_is_a_data_error():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_short, 2)
    assert all("needs 6 micro-batches, the data iterator gave 0" in text for text in caught.value.failures.values())


def _short(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    recompute = {"policy": "stage_aware", "memory_budget_gib": 1.0}
    _engine(transformer(), _config({"recompute": recompute}), 2).train_batch(iter([]))
