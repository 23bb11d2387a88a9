"""Gradients of the DeepSpeed engine equal those of one process, on every stage, under every schedule."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

import ext
from ext.runtime.channels import Receiver
from ext.testing.oracle import oracle_step
from ext.testing.ranks import run_ranks
from ext.testing.tiny_gpt import (
    TinyBlock,
    TinyEmbedding,
    TinyHead,
    tied_logits,
    token_batch,
    token_loss,
)

pytestmark = pytest.mark.dist

SCHEDULES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "zb_h1")


@dataclass(frozen=True)
class Case:
    """One engine: what it runs and how."""

    schedule: str
    gas: int
    num_stages: int
    num_blocks: int = 4
    tied: bool = False
    recompute: Any = None
    bf16: bool = False
    zero: int = 0
    block_args: dict[str, Any] = field(default_factory=dict)


def _layers(case: Case) -> list[Any]:
    blocks = [LayerSpec(TinyBlock, 10 + i, **case.block_args) for i in range(case.num_blocks)]
    if case.tied:
        first = TiedLayerSpec("embedding", TinyEmbedding, 7, tied_weight_attr=["weight"])
        last = TiedLayerSpec("embedding", TinyEmbedding, 7, forward_fn=tied_logits, tied_weight_attr=["weight"])
        return [first, *blocks, last]
    return [LayerSpec(TinyEmbedding, 7), *blocks, LayerSpec(TinyHead, 8)]


def _config(case: Case) -> dict[str, Any]:
    block: dict[str, Any] = {"pipeline": {"schedule": case.schedule}}
    if case.recompute is not None:
        block["recompute"] = {"policy": case.recompute}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": case.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": block,
    }


def _engine(case: Case) -> Any:
    module = PipelineModule(
        layers=_layers(case), num_stages=case.num_stages, loss_fn=token_loss, partition_method="uniform"
    )
    return ext.initialize(model=module, model_parameters=list(module.parameters()), config=_config(case))[0]


def _oracle(case: Case, batches: list[Any]) -> Any:
    embedding = TinyEmbedding(7)
    blocks = [TinyBlock(10 + i, **case.block_args) for i in range(case.num_blocks)]
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


def _compare(case: Case, rank: int, world_size: int) -> dict[str, Any]:
    """One train_batch; the worst relative gradient error on this rank and both losses."""
    engine = _engine(case)
    dp = world_size // case.num_stages
    dp_rank = engine.grid.data_parallel_id
    batches = [token_batch(100 + i) for i in range(case.gas * dp)]
    captured: dict[str, torch.Tensor] = {}
    take_step = engine._take_model_step

    def capture_then_step(*args: Any) -> Any:
        for name, parameter in engine.module.named_parameters():
            grad = parameter.grad if case.zero == 0 and not case.bf16 else deepspeed.utils.safe_get_full_grad(parameter)
            if grad is not None:
                captured[name] = grad.clone().float()
        return take_step(*args)

    engine._take_model_step = capture_then_step
    loss = engine.train_batch(iter(batches[dp_rank * case.gas : (dp_rank + 1) * case.gas]))
    want = _oracle(case, batches)
    worst = 0.0
    start = engine.module._local_start
    for position, function in enumerate(engine.module.forward_funcs):
        expected = want.gradients[start + position]
        for name, gradient in expected.items():
            full = f"{start + position}.{name}"
            tied_name = f"tied_modules.embedding.{name}"
            if full not in captured and tied_name not in captured:
                assert case.tied, f"{full} was not captured: {sorted(captured)} {function}"
            got = captured[full] if full in captured else captured[tied_name]
            if gradient is None:
                continue
            if case.tied and name == "position":
                continue  # each copy of an untied attribute has its own gradient
            error = (got - gradient.float()).norm() / gradient.float().norm()
            worst = max(worst, error.item())
    description = ext.describe(engine)
    return {
        "case": case,
        "error": worst,
        "loss": loss.item(),
        "oracle_loss": want.loss.item(),
        "recomputes": description["recomputes"],
        "layers": description["partition"]["layers_per_stage"],
        "num_params": len(captured),
    }


def _run(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    return [_compare(case, rank, world_size) for case in cases]


def _check(results: list[list[dict[str, Any]]]) -> None:
    for by_case in zip(*results, strict=True):
        for rank, result in enumerate(by_case):
            case = result["case"]
            tolerance = 1e-2 if case.bf16 else 1e-5
            assert result["error"] < tolerance, (rank, result)
            assert abs(result["loss"] - result["oracle_loss"]) < (1e-2 if case.bf16 else 1e-6), (rank, result)
            assert result["num_params"] > 0


def _legal(schedule: str, gas: int) -> bool:
    return schedule != "shifted_critical_path" or gas >= 4


def _cases(num_stages: int, gas: tuple[int, ...], **kwargs: Any) -> list[Case]:
    return [
        Case(schedule, m, num_stages, **kwargs)
        for schedule, m in itertools.product(SCHEDULES, gas)
        if _legal(schedule, m)
    ]


def test_two_stages():
    cases = _cases(2, (1, 2, 5, 8)) + _cases(2, (5,), num_blocks=5, tied=True)
    _check(run_ranks(_run, 2, cases))


def test_two_stages_bf16_and_zero():
    cases = [
        *_cases(2, (4,), zero=1),
        *_cases(2, (4,), bf16=True),
        *_cases(2, (4,), bf16=True, zero=1, tied=True),
    ]
    _check(run_ranks(_run, 2, cases))


def test_three_stages_of_uneven_layers():
    _check(run_ranks(_run, 3, _cases(3, (4, 7), num_blocks=5, tied=True)))


def test_four_stages_and_two_pipelines_of_two():
    cases = _cases(4, (1, 8)) + _cases(2, (2, 4)) + _cases(2, (4,), bf16=True, zero=1, tied=True)
    _check(run_ranks(_run, 4, cases, timeout=120))


def _run_with_one_gradient_slot(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The engine with one slot for the gradients of all micro-batches, as the host has."""
    wait, slot = Receiver.wait, {}

    def wait_into_one_slot(self: Any, microbatch: int) -> Any:
        message = wait(self, microbatch)
        if "gradient" not in self.name:
            return message
        # The slot is filled again before the backward of the micro-batch that it was filled for.
        slot[self], stale = message, slot.get(self, message)
        return stale

    Receiver.wait = wait_into_one_slot  # type: ignore[method-assign]
    return _run(rank, world_size, [Case("gpipe", 5, 2)])


def test_a_shared_gradient_slot_would_be_seen():
    with pytest.raises(AssertionError, match="error"):
        _check(run_ranks(_run_with_one_gradient_slot, 2))
