"""Unit policies in the DeepSpeed engine: the bits of no recomputation, counts and bytes as planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import ext
from ext.testing.ranks import run_ranks
from ext.testing.tiny_gpt import HEADS, HIDDEN, TinyBlock, TinyEmbedding, TinyHead, tied_logits, token_batch, token_loss
from ext.testing.unit_layer import UnitLayer

pytestmark = pytest.mark.dist

GAS = 4
SCHEDULES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "zb_h1")
KIB_IN_GIB = 2**-20
KEEP_LAST = ("last_no_recompute", "shifted_critical_path", "zb_h1")
"""Schedules whose last stage must or had better keep everything."""


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        squeeze: share of the activations that stages with one micro-batch in flight, and with several, do without.
    """

    schedule: str = "1f1b"
    policy: Any = "lynx_heu"
    squeeze: tuple[float, float] = (0.2, 0.45)
    gas: int = GAS
    num_blocks: int = 4
    dropout: float = 0.2
    flash: bool = False
    tied: bool = False
    opaque: bool = False
    bf16: bool = False
    overlap: bool | None = None


def _layers(case: Case) -> list[Any]:
    blocks: list[Any] = [
        LayerSpec(UnitLayer, HIDDEN, HEADS, dropout=case.dropout, flash=case.flash, seed=10 + i)
        for i in range(case.num_blocks)
    ]
    if case.opaque:
        blocks[1::2] = [LayerSpec(TinyBlock, 10 + i, case.dropout) for i in range(1, case.num_blocks, 2)]
    if case.tied:
        first = TiedLayerSpec("embedding", TinyEmbedding, 7, tied_weight_attr=["weight"])
        last = TiedLayerSpec("embedding", TinyEmbedding, 7, forward_fn=tied_logits, tied_weight_attr=["weight"])
        return [first, *blocks, last]
    return [LayerSpec(TinyEmbedding, 7), *blocks, LayerSpec(TinyHead, 8)]


def _engine(case: Case, num_stages: int, recompute: dict[str, Any]) -> Any:
    module = PipelineModule(layers=_layers(case), num_stages=num_stages, loss_fn=token_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": case.bf16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": {"pipeline": {"schedule": case.schedule}, "recompute": recompute},
    }
    return ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def _train(engine: Any, case: Case, steps: int = 2) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Losses of some steps, and the gradients of the last one."""
    captured: dict[str, torch.Tensor] = {}
    take_step = engine._take_model_step

    def capture_then_step(*args: Any) -> Any:
        for name, parameter in engine.module.named_parameters():
            gradient = deepspeed.utils.safe_get_full_grad(parameter) if case.bf16 else parameter.grad
            if gradient is not None:
                captured[name] = gradient.clone()
        return take_step(*args)

    engine._take_model_step = capture_then_step
    torch.manual_seed(5 + engine.stage_id)
    losses = [
        engine.train_batch(iter([token_batch(100 * step + i) for i in range(case.gas)])).item().hex()
        for step in range(steps)
    ]
    return losses, captured


def _squeezed(rows: list[Any], case: Case) -> list[float]:
    """Budgets in GiB: what no recomputation holds without a part of the activations."""
    kept = int(case.schedule in KEEP_LAST)
    share = [case.squeeze[min(row.in_flight, 2) - 1] for row in rows]
    return [
        (row.total - (0 if row.stage >= len(rows) - kept else share[row.stage]) * row.activations) / 2**30
        for row in rows
    ]


def _against_keeping_everything(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    deepspeed.init_distributed("gloo")
    return [_one(case, world_size) for case in cases]


def _one(case: Case, world_size: int) -> dict[str, Any]:
    plain = _engine(case, world_size, {"policy": "none", "memory_budget_gib": 1.0})
    losses, gradients = _train(plain, case)
    budgets = _squeezed(ext.memory_report(plain), case)
    recompute = {"policy": case.policy, "memory_budget_gib": budgets}
    if case.overlap is not None:
        recompute["overlap"] = case.overlap
    engine = _engine(case, world_size, recompute)
    mine = _train(engine, case)
    assert mine[0] == losses, case
    assert gradients
    assert gradients.keys() == mine[1].keys()
    assert [n for n, gradient in gradients.items() if not torch.equal(mine[1][n], gradient)] == [], case
    return {
        "case": case,
        "rows": ext.memory_report(engine),
        "counted": engine.recomputes[engine.stage_id],
        "used": {name: use.units for name, use in engine._units.report.windows.items()},
        "skipped": (engine._units.report.skipped, engine._units.report.repeated),
        "tables": engine.resolution.tables,
        "hash": engine.plan.hash,
    }


def _check(by_rank: list[list[dict[str, Any]]]) -> None:
    for results in zip(*by_rank, strict=True):
        assert len({result["hash"] for result in results}) == 1
        for stage, result in enumerate(results):
            case, tables, row = result["case"], result["tables"].stages[stage], result["rows"][stage]
            assert result["counted"] == case.gas * tables.num_units, (case, stage)
            early = round(result["tables"].early[stage] * case.gas)
            waiting = sum(map(len, tables.recomputed("P")))
            used = result["used"]
            assert used.get("P", 0) == early * waiting, (case, stage)
            assert used.get("C", 0) == case.gas * tables.num_units - early * waiting, (case, stage)
            assert result["skipped"] == (0, 0), (case, stage)
            assert row.total <= row.budget, (case, stage)
            assert row.measured <= row.live, (case, stage)
            assert tables.num_units > 0 or (stage == 1 and (case.opaque or case.schedule in KEEP_LAST)), (case, stage)


def test_two_stages():
    cases = [
        Case(),
        Case(policy="lynx_opt"),
        *(Case(schedule=name, gas=5) for name in SCHEDULES[1:-1]),
        Case(schedule="zb_h1", gas=5, squeeze=(0.0, 0.2)),
        Case(tied=True, flash=True, squeeze=(0.05, 0.35)),
        Case(opaque=True, squeeze=(0.0, 0.35)),
        Case(bf16=True),
        Case(overlap=False),
    ]
    by_rank = run_ranks(_against_keeping_everything, 2, cases, timeout=150)
    _check(by_rank)
    assert "0R" in by_rank[0][0]["tables"].plan.to_text()
