"""`auto` in the DeepSpeed engine: one plan on all ranks, the gradients of one process, a plan file to run again."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import ext
from ext.core.errors import ConfigError
from ext.pipeline.plan_file import read_plan
from ext.testing.oracle import oracle_step
from ext.testing.ranks import RanksFailed, run_ranks
from ext.testing.tiny_gpt import (
    TinyBlock,
    TinyEmbedding,
    TinyHead,
    tied_logits,
    token_batch,
    token_loss,
)

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Case:
    """One engine under `auto`."""

    num_stages: int
    gas: int
    num_blocks: int = 4
    tied: bool = False
    dropout: float = 0.0
    bf16: bool = False
    zero: int = 0
    budget_mib: float | None = None
    tolerance: float = 0.0


def _layers(case: Case) -> list[Any]:
    blocks = [LayerSpec(TinyBlock, 10 + i, case.dropout) for i in range(case.num_blocks)]
    if case.tied:
        first = TiedLayerSpec("embedding", TinyEmbedding, 7, tied_weight_attr=["weight"])
        last = TiedLayerSpec("embedding", TinyEmbedding, 7, forward_fn=tied_logits, tied_weight_attr=["weight"])
        return [first, *blocks, last]
    return [LayerSpec(TinyEmbedding, 7), *blocks, LayerSpec(TinyHead, 8)]


def _engine(case: Case, schedule: Any, **arguments: Any) -> Any:
    module = PipelineModule(
        layers=_layers(case), num_stages=case.num_stages, loss_fn=token_loss, partition_method="uniform"
    )
    block: dict[str, Any] = {"pipeline": {"schedule": schedule, "tolerance": case.tolerance}}
    if case.budget_mib is not None:
        block["recompute"] = {"policy": "stage_aware", "memory_budget_gib": case.budget_mib / 1024}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": case.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": block,
    }
    parameters = list(module.parameters())
    return ext.initialize(model=module, model_parameters=parameters, config=config, **arguments)[0]


AUTO = {"type": "auto", "search_seconds": 0.3}


def _capture(engine: Any, case: Case) -> dict[str, torch.Tensor]:
    captured: dict[str, torch.Tensor] = {}
    take_step = engine._take_model_step

    def capture_then_step(*args: Any) -> Any:
        for name, parameter in engine.module.named_parameters():
            plain = case.zero == 0 and not case.bf16
            grad = parameter.grad if plain else deepspeed.utils.safe_get_full_grad(parameter)
            if grad is not None:
                captured[name] = grad.clone().float()
        return take_step(*args)

    engine._take_model_step = capture_then_step
    return captured


def _gradients(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    deepspeed.init_distributed("gloo")
    return [_against_one_process(case) for case in cases]


def _against_one_process(case: Case) -> dict[str, Any]:
    torch.manual_seed(7)
    engine = _engine(case, AUTO)
    captured = _capture(engine, case)
    batches = [token_batch(100 + i) for i in range(case.gas)]
    loss = engine.train_batch(iter(batches))
    want = _oracle(case, batches)
    start = engine.module._local_start
    worst = 0.0
    for position in range(len(engine.module.forward_funcs)):
        for name, gradient in want.gradients[start + position].items():
            full, tied_name = f"{start + position}.{name}", f"tied_modules.embedding.{name}"
            got = captured.get(full, captured.get(tied_name))
            if gradient is None or (case.tied and name == "position"):
                continue  # each copy of an untied attribute has its own gradient
            assert got is not None, full
            worst = max(worst, ((got - gradient.float()).norm() / gradient.float().norm()).item())
    description = ext.describe(engine)
    return {
        "case": case,
        "error": worst,
        "loss_error": abs(loss.item() - want.loss.item()),
        "hash": description["plan_hash"],
        "orders": description["orders"],
        "recomputes": description["recomputes"],
        "planned": {str(engine.stage_id): engine.plan.recomputed_layers[engine.stage_id] * case.gas},
        "source": engine.resolution.chosen.source,
    }


def _oracle(case: Case, batches: list[Any]) -> Any:
    embedding = TinyEmbedding(7)
    blocks = [TinyBlock(10 + i, case.dropout) for i in range(case.num_blocks)]
    layers: list[Any] = [embedding, *blocks]
    layers.append((lambda x: tied_logits(embedding, x)) if case.tied else TinyHead(8))
    if case.bf16:
        for layer in layers:
            if isinstance(layer, torch.nn.Module):
                layer.to(torch.bfloat16)
    step = oracle_step(layers, token_loss, batches)
    if case.tied:
        step.gradients[-1] = step.gradients[0]
    return step


def _check(results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    for by_case in zip(*results, strict=True):
        assert len({result["hash"] for result in by_case}) == 1
        for rank, result in enumerate(by_case):
            case = result["case"]
            assert result["error"] < (1e-2 if case.bf16 else 1e-5), (rank, result)
            assert result["loss_error"] < (1e-2 if case.bf16 else 1e-6), (rank, result)
            assert result["recomputes"] == result["planned"], (rank, result)
    return results[0]


def _kinds(orders: dict[str, list[str]]) -> set[str]:
    return {letter for order in orders.values() for action in order for letter in action if letter.isalpha()}


def test_gradients_on_two_stages():
    cases = [
        Case(2, 5),
        Case(2, 8, num_blocks=5, tied=True),
        Case(2, 4, zero=1),
        Case(2, 5, bf16=True, zero=1, tied=True),
        # Room for the states and for little more than one micro-batch: layers are recomputed.
        Case(2, 5, budget_mib=0.55),
    ]
    found = _check(run_ranks(_gradients, 2, cases, timeout=150))
    assert any({"I", "W"} <= _kinds(result["orders"]) for result in found)
    assert all(sum(result["recomputes"].values()) == 0 for result in found[:4])
    assert sum(found[4]["recomputes"].values()) > 0


def test_gradients_on_three_and_four_stages_of_uneven_layers():
    _check(run_ranks(_gradients, 3, [Case(3, 7, num_blocks=5, tied=True), Case(3, 4, num_blocks=6)], timeout=120))
    _check(run_ranks(_gradients, 4, [Case(4, 6, num_blocks=5), Case(4, 5, num_blocks=4, tied=True)], timeout=120))


def _bits(rank: int, world_size: int, folder: str) -> list[str]:
    """Steps under 1f1b, under auto, and under the plan file that auto wrote, all on the same weights and data."""
    deepspeed.init_distributed("gloo")
    os.environ["EXT_RUN_DIR"] = folder
    case = Case(world_size, 5, num_blocks=5, dropout=0.2)
    path = Path(folder) / "ext_plan.json"
    found = []
    for schedule in ("1f1b", AUTO, {"type": "plan_file", "path": str(path)}):
        torch.manual_seed(5)
        engine = _engine(case, schedule)
        batches = iter([token_batch(300 + i) for i in range(15)])
        losses = [engine.train_batch(batches).item().hex() for _ in range(3)]
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        found.append((losses, weights, ext.describe(engine)))
        torch.distributed.barrier()
    (plain, plain_weights, _), *others = found
    for losses, weights, _ in others:
        assert losses == plain
        assert all(torch.equal(weights[name], weight) for name, weight in plain_weights.items())
    auto, again = (description for *_, description in others)
    assert auto["plan_hash"] == again["plan_hash"] == read_plan(path).hash
    assert auto["orders"] == again["orders"]
    content = json.loads(path.read_text())
    assert set(content["versions"]) >= {"megatron-deepspeed-ext", "deepspeed", "torch", "python"}
    assert content["search"]["presets"]["1f1b"] >= content["search"]["best_time"] > 0
    assert len(content["costs"]["stages"]) == world_size
    return [auto["schedule"], auto["plan_hash"]]


def test_auto_and_its_plan_file_train_to_the_bits_of_1f1b(tmp_path):
    found = run_ranks(_bits, 3, str(tmp_path), timeout=120)
    assert found[0] == found[1] == found[2]


def _kept(rank: int, world_size: int) -> tuple[str, str]:
    deepspeed.init_distributed("gloo")
    engine = _engine(Case(2, 4, tolerance=0.9), AUTO, sample_batch=token_batch(3))
    chosen = engine.resolution.chosen
    assert chosen.step_time == chosen.presets["1f1b"] >= chosen.best_time
    before = ext.describe(engine)
    engine.train_batch(iter([token_batch(i) for i in range(4)]))
    assert ext.describe(engine)["plan_hash"] == before["plan_hash"]
    return before["schedule"], chosen.reason


def test_plain_1f1b_is_kept_within_the_tolerance_from_a_sample_batch():
    schedules = run_ranks(_kept, 2, timeout=90)
    assert [schedule for schedule, _ in schedules] == ["1f1b", "1f1b"]


def _differing_files(rank: int, world_size: int, paths: list[str]) -> None:
    deepspeed.init_distributed("gloo")
    _engine(Case(2, 4), {"type": "plan_file", "path": paths[rank]})


def _hand_written(path: Path, orders: dict[str, str], **changes: Any) -> str:
    content = {
        "format": 1,
        "num_microbatches": 4,
        "rank_of": [0, 1],
        "layers_per_stage": [3, 3],
        "recomputed_layers": [0, 0],
        "orders": orders,
        **changes,
    }
    path.write_text(json.dumps(content))
    return str(path)


def test_a_plan_file_that_differs_or_does_not_fit_is_one_error_on_all_ranks(tmp_path):
    first = {"0": "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1": "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"}
    second = {**first, "1": "1F0 1I0 1W0 1F1 1B1 1F2 1B2 1F3 1B3"}
    good = _hand_written(tmp_path / "a.json", first)
    cases = {
        "differs between ranks": [good, _hand_written(tmp_path / "b.json", second)],
        "no plan can be read": [good, str(tmp_path / "missing.json")],
        "for 4 micro-batches": [_hand_written(tmp_path / "c.json", first, layers_per_stage=[2, 4])] * 2,
    }
    cases["layers per stage"] = cases.pop("for 4 micro-batches")
    for text, paths in cases.items():
        with pytest.raises(RanksFailed) as failed:
            run_ranks(_differing_files, 2, paths, timeout=60)
        errors = [str(error) for error in failed.value.errors.values()]
        assert all(isinstance(error, ConfigError) for error in failed.value.errors.values()), failed.value
        assert len(errors) == 2
        assert errors[0] == errors[1]
        assert text in errors[0]
