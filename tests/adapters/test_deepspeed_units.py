"""Unit policies in the DeepSpeed engine: the bits of no recomputation, counts and bytes as planned."""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import ext
from ext.core.errors import ConfigError
from ext.recompute.stage_aware import BudgetError
from ext.recompute.table import OPAQUE, UnitTable
from ext.testing.ranks import run_ranks
from ext.testing.tiny_gpt import HEADS, HIDDEN, TinyBlock, TinyEmbedding, TinyHead, tied_logits, token_batch, token_loss
from ext.testing.unit_layer import UnitLayer

pytestmark = pytest.mark.dist

GAS = 4
OPT = {"type": "lynx_opt", "time_limit_s": 0.5}
UNITS = tuple(unit.name for unit in UnitLayer(HIDDEN, HEADS).units().units)
DECISIONS = ("keep", "P", "C", "F1", "B2", "unused", "no window")
SCHEDULES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "zb_h1")
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


def _engine(case: Case, num_stages: int, recompute: dict[str, Any], **arguments: Any) -> Any:
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
    parameters = list(module.parameters())
    return ext.initialize(model=module, model_parameters=parameters, config=config, **arguments)[0]


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
    # Decisions take gradients in 16 bits to be there all the time; the table knows that a W takes them away again.
    more = [row.states.parameters if case.bf16 and case.schedule == "zb_h1" else 0 for row in rows]
    return [
        (row.total + more[row.stage] - (0 if row.stage >= len(rows) - kept else share[row.stage]) * row.activations)
        / 2**30
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
    world_size = len(by_rank)
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
            # Gradients that wait for W are counted where they are; the plan knows of activations alone.
            assert row.measured <= (row.total if case.schedule == "zb_h1" else row.live), (case, stage)
            spared = stage == world_size - 1 and (case.squeeze[0] == 0 or case.opaque or case.schedule in KEEP_LAST)
            assert tables.num_units > 0 or spared, (case, stage)


def test_two_stages_under_every_schedule():
    cases = [
        Case(),
        *(Case(schedule=name, gas=5, policy=OPT) for name in SCHEDULES[1:-1]),
        Case(schedule="zb_h1", gas=5, squeeze=(0.0, 0.2)),
        Case(tied=True, flash=True, squeeze=(0.05, 0.35)),
        Case(opaque=True, bf16=True, overlap=False, squeeze=(0.0, 0.35)),
    ]
    by_rank = run_ranks(_against_keeping_everything, 2, cases, timeout=150)
    _check(by_rank)
    early = {result["case"].overlap: bool(result["tables"].plan.early_recomputes) for result in by_rank[0]}
    assert early[False] is False


@pytest.mark.slow
def test_three_stages_in_both_precisions():
    common = [
        Case(bf16=bf16, policy=policy, num_blocks=7, squeeze=(0.0, 0.35))
        for bf16 in (False, True)
        for policy in ("lynx_heu", OPT)
    ]
    cases = [replace(case, schedule=name) for name in SCHEDULES[:-1] for case in common]
    cases += [replace(case, schedule="zb_h1", squeeze=(0.0, 0.08)) for case in common]
    cases += [replace(common[0], tied=True, gas=7), replace(common[0], opaque=True, gas=3, squeeze=(0.0, 0.25))]
    _check(run_ranks(_against_keeping_everything, 3, cases, timeout=400))


# -- plans that are wrong, stale or impossible ---------------------------------------------------------------


def _with_wrong_tables(rank: int, world_size: int) -> int:
    """Steps under tables drawn by lot, with windows and units that do not exist, and with reserves of any size."""
    deepspeed.init_distributed("gloo")
    early = 0
    for schedule in ("1f1b", "early_recompute", "zb_h1"):
        case = Case(schedule=schedule, squeeze=(0.0, 0.2))
        plain = _engine(case, world_size, {"policy": "none", "memory_budget_gib": 1.0})
        losses, gradients = _train(plain, case)
        recompute = {"policy": "lynx_heu", "memory_budget_gib": _squeezed(ext.memory_report(plain), case)}
        for seed in range(3):
            engine = _engine(case, world_size, recompute, sample_batch=token_batch(0))
            engine.memory._was_counted = True  # these tables need not keep the budget
            draw, units = random.Random(seed), engine._units
            tables = [
                UnitTable.of({name: draw.choice(DECISIONS) for name in ("stranger", OPAQUE, *UNITS)})
                for _ in units.tables.tables
            ]
            units.tables = replace(units.tables, tables=tuple(tables))
            units.reserve.limit = draw.choice((0, 30_000, None))
            mine = _train(engine, case)
            assert mine[0] == losses, (schedule, seed)
            assert all(torch.equal(mine[1][name], gradient) for name, gradient in gradients.items()), (schedule, seed)
            assert units.report.repeated == 0
            assert units.reserve.live == 0
            early += units.report.windows["P"].units if "P" in units.report.windows else 0
    return early


def test_wrong_tables_change_no_gradient():
    early = run_ranks(_with_wrong_tables, 2, timeout=150)
    assert max(early) > 0


def _impossible(rank: int, world_size: int) -> tuple[str, list[Any]]:
    deepspeed.init_distributed("gloo")
    case = Case(policy="lynx_opt")
    with pytest.raises(BudgetError) as refused:
        _engine(case, world_size, {"policy": "lynx_opt", "memory_budget_gib": 0.1e-3}, sample_batch=token_batch(0))
    text = str(refused.value)
    smallest = [float(size) * 1024 for size in re.findall(r"([0-9.]+) KiB[,.]", text.rpartition("by stage:")[2])]
    # Enough is enough, but for the rounding of the message.
    budgets = [(size + 1) / 2**30 for size in smallest]
    engine = _engine(case, world_size, {"policy": "lynx_opt", "memory_budget_gib": budgets})
    engine.train_batch(iter([token_batch(i) for i in range(case.gas)]))
    below = [size * 0.995 / 2**30 for size in smallest]
    with pytest.raises(BudgetError):
        _engine(case, world_size, {"policy": "lynx_opt", "memory_budget_gib": below}, sample_batch=token_batch(0))
    return text, ext.memory_report(engine)


def test_an_impossible_budget_names_the_smallest_on_all_ranks():
    (first, rows), (second, _) = run_ranks(_impossible, 2, timeout=100)
    assert first == second
    assert first.startswith("ext.recompute.memory_budget_gib: stage 0 needs at least ")
    assert all(row.measured <= row.budget for row in rows)


def _reused(rank: int, world_size: int, folder: str) -> list[str]:
    deepspeed.init_distributed("gloo")
    os.environ["EXT_RUN_DIR"] = folder
    case, path = Case(opaque=True), os.path.join(folder, "ext_unit_profile.json")
    recompute = {"policy": "lynx_heu", "memory_budget_gib": 0.8e-3}
    first = _engine(case, world_size, recompute, sample_batch=token_batch(0))
    again = {**recompute, "policy": {"type": "lynx_heu", "profile": path}}
    second = _engine(case, world_size, again, sample_batch=token_batch(0))
    assert second.memory.units == first.memory.units
    assert any(costs is not None for stage in second.memory.units for costs in stage)
    refused = []
    for other in (replace(case, opaque=False), case):
        with pytest.raises(ConfigError) as error:
            _engine(other, world_size, again, sample_batch=token_batch(0, seq=8))
        refused.append(str(error.value))
    return refused


def test_a_profile_serves_a_later_run_and_no_other_model(tmp_path):
    first, second = run_ranks(_reused, 2, str(tmp_path), timeout=100)
    assert first == second
    assert first[0].startswith("ext.recompute.policy.profile: the unit profile does not fit: it is of the layers Tiny")
    assert "took 4096 bytes, in this run 2048" in first[1]
