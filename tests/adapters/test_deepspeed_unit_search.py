"""Unit policies under `auto` and from a plan file: the bits of no recomputation, one plan that keeps the budgets."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import ext
from ext.core.errors import ConfigError
from ext.pipeline.plan_file import read_plan
from ext.planner.search import units as unit_search
from ext.recompute.stage_aware import BudgetError
from ext.testing.ranks import run_ranks
from ext.testing.tiny_gpt import HEADS, HIDDEN, TinyEmbedding, TinyHead, tied_logits, token_batch, token_loss
from ext.testing.unit_layer import UnitLayer

pytestmark = pytest.mark.dist

OPT = {"type": "lynx_opt", "time_limit_s": 0.2}
AUTO = {"type": "auto", "search_seconds": 0.3}


@dataclass(frozen=True)
class Case:
    """One model under `auto`.

    Attributes:
        squeeze: share of the activations under 1f1b that each stage does without.
    """

    gas: int = 5
    policy: Any = "lynx_heu"
    squeeze: float = 0.3
    num_blocks: int = 4
    tied: bool = False
    bf16: bool = False
    overlap: bool | None = None


def _layers(case: Case) -> list[Any]:
    blocks = [LayerSpec(UnitLayer, HIDDEN, HEADS, dropout=0.2, seed=10 + i) for i in range(case.num_blocks)]
    if case.tied:
        first = TiedLayerSpec("embedding", TinyEmbedding, 7, tied_weight_attr=["weight"])
        last = TiedLayerSpec("embedding", TinyEmbedding, 7, forward_fn=tied_logits, tied_weight_attr=["weight"])
        return [first, *blocks, last]
    return [LayerSpec(TinyEmbedding, 7), *blocks, LayerSpec(TinyHead, 8)]


def _engine(case: Case, schedule: Any, recompute: dict[str, Any] | None, **arguments: Any) -> Any:
    stages = torch.distributed.get_world_size()
    module = PipelineModule(layers=_layers(case), num_stages=stages, loss_fn=token_loss, partition_method="uniform")
    block = {"pipeline": {"schedule": schedule, "tolerance": 0.0}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.gas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": case.bf16},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": block if recompute is None else {**block, "recompute": recompute},
    }
    parameters = list(module.parameters())
    return ext.initialize(model=module, model_parameters=parameters, config=config, **arguments)[0]


def _train(engine: Any, case: Case) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Losses of two steps, and the weights behind them."""
    torch.manual_seed(5 + engine.stage_id)
    batches = iter([token_batch(i) for i in range(2 * case.gas)])
    losses = [engine.train_batch(batches).item().hex() for _ in range(2)]
    return losses, {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def _same(mine: tuple[list[str], dict[str, torch.Tensor]], wanted: tuple[list[str], dict[str, torch.Tensor]]) -> None:
    assert mine[0] == wanted[0]
    assert [name for name, weight in wanted[1].items() if not torch.equal(mine[1][name], weight)] == []


def _without_whole_layers() -> pytest.MonkeyPatch:
    """Measured times of tiny layers would decide between whole layers and units: here whole layers never fit."""
    patch, searched = pytest.MonkeyPatch(), []

    def search(space: Any, **options: Any) -> Any:
        searched.append(space)
        if len(searched) % 2:
            raise BudgetError("refused")
        return original(space, **options)

    original = unit_search.search
    patch.setattr(unit_search, "search", search)
    return patch


def _under_auto(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    deepspeed.init_distributed("gloo")
    os.environ["EXT_RUN_DIR"] = folder
    return [_one(case, Path(folder) / "ext_plan.json") for case in cases]


def _one(case: Case, path: Path) -> dict[str, Any]:
    plain = _engine(case, "1f1b", {"policy": "none", "memory_budget_gib": 1.0})
    wanted = _train(plain, case)
    rows = ext.memory_report(plain)
    budgets = [(row.total - case.squeeze * row.activations) / 2**30 for row in rows]
    recompute = {"policy": case.policy, "memory_budget_gib": budgets}
    if case.overlap is not None:
        recompute["overlap"] = case.overlap
    patch = _without_whole_layers()
    engine = _engine(case, AUTO, recompute)
    _same(_train(engine, case), wanted)
    patch.undo()
    torch.distributed.barrier()
    again = _engine(case, {"type": "plan_file", "path": str(path)}, None)
    _same(_train(again, case), wanted)
    assert again.resolution.tables.stages == engine.resolution.tables.stages
    assert again.resolution.tables.reserves == engine.resolution.tables.reserves
    budgeted = _engine(case, {"type": "plan_file", "path": str(path)}, recompute)
    _same(_train(budgeted, case), wanted)
    results = [_seen(one, case) for one in (engine, again, budgeted)]
    torch.distributed.barrier()
    for result in results[1:]:
        assert {**result, "rows": results[0]["rows"]} == results[0]
    return {**results[0], "case": case, "again": results[2]["rows"]}


def _seen(engine: Any, case: Case) -> dict[str, Any]:
    """What was planned and done."""
    tables, report = engine.resolution.tables, engine._units.report
    stages = ext.recompute_report(engine)
    mine = stages[engine.stage_id]
    planned = {row.window: row.units_planned for row in mine.windows if row.units_planned > 1e-9}
    assert {row.window: row.units for row in mine.windows if row.units} == pytest.approx(planned)
    return {
        "hash": engine.plan.hash,
        "orders": ext.describe(engine)["orders"],
        "early": tables.early,
        "num_units": tables.stages[engine.stage_id].num_units,
        "counted": engine.recomputes[engine.stage_id],
        "skipped": (report.skipped, report.repeated),
        "rows": ext.memory_report(engine),
    }


def _check(by_rank: list[list[dict[str, Any]]]) -> None:
    for results in zip(*by_rank, strict=True):
        assert len({result["hash"] for result in results}) == 1
        assert any(result["num_units"] for result in results)
        for stage, result in enumerate(results):
            case = result["case"]
            assert result["counted"] == case.gas * result["num_units"], (case, stage)
            assert result["skipped"] == (0, 0), (case, stage)
            assert not any(result["early"]) or case.overlap is not False
            for rows in (result["rows"], result["again"]):
                assert rows[stage].total <= rows[stage].budget, (case, stage)
                assert rows[stage].measured <= rows[stage].total, (case, stage)


def test_two_stages(tmp_path):
    cases = [Case(), Case(policy=OPT, tied=True, bf16=True, gas=4)]
    _check(run_ranks(_under_auto, 2, cases, str(tmp_path), timeout=150))


@pytest.mark.slow
def test_three_stages_in_both_precisions(tmp_path):
    common = [Case(bf16=bf16, policy=policy, num_blocks=7) for bf16 in (False, True) for policy in ("lynx_heu", OPT)]
    cases = [
        *common,
        replace(common[0], overlap=False),
        replace(common[0], tied=True, gas=7, squeeze=0.2),
        replace(common[1], squeeze=0.1, gas=3),
    ]
    _check(run_ranks(_under_auto, 3, cases, str(tmp_path), timeout=300))


def _by_whole_layers_or_units(rank: int, world_size: int, folder: str) -> tuple[str, dict[str, Any]]:
    """Whatever the measured times choose: the bits, the budget and the reason."""
    deepspeed.init_distributed("gloo")
    os.environ["EXT_RUN_DIR"] = folder
    case = Case()
    plain = _engine(case, "1f1b", {"policy": "none", "memory_budget_gib": 1.0})
    wanted = _train(plain, case)
    budgets = [(row.total - 0.4 * row.activations) / 2**30 for row in ext.memory_report(plain)]
    engine = _engine(case, AUTO, {"policy": "lynx_heu", "memory_budget_gib": budgets}, sample_batch=token_batch(0))
    _same(_train(engine, case), wanted)
    chosen, tables = engine.resolution.chosen, engine.resolution.tables
    assert chosen.step_time <= chosen.whole_layers
    assert all(chosen.step_time <= time for time in chosen.presets.values())
    assert bool(engine.plan.unit_tables) == (tables is not None)
    refused = []
    small = [0.1 * budget for budget in budgets]
    with pytest.raises(ConfigError) as error:
        _engine(case, AUTO, {"policy": "lynx_heu", "memory_budget_gib": small}, sample_batch=token_batch(0))
    refused.append(str(error.value))
    return refused[0], json.loads((Path(folder) / "ext_plan.json").read_text())


def test_the_better_of_whole_layers_and_units_is_taken_and_said(tmp_path):
    (first, content), (second, _) = run_ranks(_by_whole_layers_or_units, 2, str(tmp_path), timeout=100)
    assert first == second
    assert first.startswith("ext.recompute.memory_budget_gib: no schedule of 5 micro-batches on 2 ranks was found")
    assert content["search"]["whole_layers_time"] >= content["search"]["best_time"] > 0
    assert ("units" in content) == ("unit_tables" in content)
    assert read_plan(tmp_path / "ext_plan.json").hash == content["hash"]
