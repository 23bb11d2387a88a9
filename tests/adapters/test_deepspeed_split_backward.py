"""Split backward in the DeepSpeed engine: the bits of a fused one, ties and frozen weights left as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ext
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

GAS = 5


@dataclass(frozen=True)
class Setup:
    """One way to run the same model, under several schedules."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    ext: dict[str, Any] = field(default_factory=dict)
    checkpoint_interval: int = 0


SETUPS = (
    Setup("fp32"),
    Setup("every layer recomputed", ext={"recompute": {"policy": "full"}}),
    Setup("one layer recomputed on the first stage", ext={"recompute": {"policy": [1, 0]}}),
    Setup("DeepSpeed's checkpointing", checkpoint_interval=1),
    Setup("ZeRO-1", {"zero_optimization": {"stage": 1}}),
    Setup("bf16", {"bf16": {"enabled": True}}),
    Setup("bf16, ZeRO-1", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
    Setup("bf16, gradients added at once", {"bf16": {"enabled": True, "immediate_grad_update": True}}),
    Setup("autocast", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
)


class TwoStreams(nn.Module):
    """Two tensors that both carry a gradient, and one that carries none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.left, self.right = TinyBlock(seed, 0.2), TinyBlock(seed + 1, 0.2)

    def forward(self, inputs: Any) -> Any:
        left, right, scale = inputs if isinstance(inputs, tuple) else (inputs, inputs * 0.5, torch.tensor(2.0))
        return self.left(left) + right, self.right(right) * scale, scale


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = TinyHead(8)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.head(inputs[0] + inputs[1])


def _gpt(num_blocks: int = 4, dropout: float = 0.2) -> list[Any]:
    blocks = [LayerSpec(TinyBlock, 10 + i, dropout) for i in range(num_blocks)]
    return [LayerSpec(TinyEmbedding, 7), *blocks, LayerSpec(TinyHead, 8)]


def _tied() -> list[Any]:
    first = TiedLayerSpec("embedding", TinyEmbedding, 7, tied_weight_attr=["weight"])
    last = TiedLayerSpec("embedding", TinyEmbedding, 7, forward_fn=tied_logits, tied_weight_attr=["weight"])
    return [first, *_gpt(6, 0.0)[1:-1], last]


def _streams() -> list[Any]:
    return [LayerSpec(TinyEmbedding, 7), *[LayerSpec(TwoStreams, 2 * i) for i in range(3)], LayerSpec(Merge)]


def _engine(
    layers: list[Any], num_stages: int, schedule: str, setup: Setup = SETUPS[0], frozen: tuple[str, ...] = ()
) -> Any:
    module = PipelineModule(
        layers=layers,
        num_stages=num_stages,
        loss_fn=token_loss,
        partition_method="uniform",
        activation_checkpoint_interval=setup.checkpoint_interval,
        # DeepSpeed's reentrant checkpointing cannot train an embedding, whose input carries no gradient.
        checkpointable_layers=["TinyBlock"] if setup.checkpoint_interval else None,
    )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **setup.config,
        "ext": {"pipeline": {"schedule": schedule}, **setup.ext},
    }
    return ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def _train(engine: Any, num_steps: int) -> list[str]:
    batches = [[token_batch(1000 + GAS * step + i) for i in range(GAS)] for step in range(num_steps)]
    return [engine.train_batch(iter(batch)).item().hex() for batch in batches]


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _same_bits(rank: int, world_size: int, setups: tuple[Setup, ...]) -> None:
    deepspeed.init_distributed("gloo")
    models = [(setup, _gpt) for setup in setups] + [(Setup("several tensors between stages"), _streams)]
    for setup, layers in models:
        found = []
        for schedule in ("1f1b", "zb_h1"):
            torch.manual_seed(5)
            engine = _engine(layers(), world_size, schedule, setup)
            before = _weights(engine)
            deferred = _count_deferred(engine)
            found.append((_train(engine, 3), _weights(engine), ext.describe(engine)["recomputes"]))
            assert any(not torch.equal(before[name], weight) for name, weight in found[-1][1].items()), setup.name
            assert (sum(deferred) > 0) == (schedule == "zb_h1"), setup.name
        (losses, weights, recomputes), (split_losses, split_weights, split_recomputes) = found
        assert losses == split_losses, setup.name
        assert recomputes == split_recomputes, setup.name
        for name, weight in weights.items():
            assert torch.equal(weight, split_weights[name]), (setup.name, name)


def _count_deferred(engine: Any) -> list[int]:
    """Weight gradients that each W of the engine computes, as it runs."""
    counts: list[int] = []
    train_schedule = engine._train_schedule

    def counting() -> Any:
        schedule = train_schedule()
        queue = engine._weight_grads
        release = queue.release

        def count_then_release(stage: int, microbatch: int, *after: Any) -> None:
            counts.append(len(queue._jobs[stage, microbatch]))
            release(stage, microbatch, *after)

        queue.release = count_then_release
        return schedule

    engine._train_schedule = counting
    return counts


def test_split_and_fused_backward_train_to_the_same_bits():
    run_ranks(_same_bits, 2, SETUPS, timeout=150)


def _tied_and_frozen(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    engine = _engine(_tied(), world_size, "zb_h1")
    _train_and_check(engine, "tied")
    if "embedding" in engine.module.tied_modules:
        weight = engine.module.tied_modules["embedding"].weight.detach()
        copies = [torch.empty_like(weight) for _ in range(2)]
        torch.distributed.all_gather(copies, weight, group=engine.module.tied_comms["embedding"]["group"])
        assert torch.equal(*copies)

    adapters = (".qkv.", ".proj.", ".fc1.", "weight", "position")
    _train_and_check(_engine(_gpt(6), world_size, "zb_h1", frozen=adapters), "adapters only")
    for stage in range(world_size):
        frozen = ("",) if rank == stage else ()
        _train_and_check(_engine(_gpt(6), world_size, "zb_h1", frozen=frozen), f"stage {stage} frozen")


def _train_and_check(engine: Any, what: str) -> None:
    before = _weights(engine)
    losses = _train(engine, 20)
    assert all(torch.isfinite(torch.tensor(float.fromhex(loss))) for loss in losses), what
    for name, parameter in engine.module.named_parameters():
        # One copy of a tied embedding's untied attribute is never used.
        if "position" not in name:
            assert torch.equal(before[name], parameter) != parameter.requires_grad, (what, name)


def test_tied_adapters_only_and_frozen_stages():
    run_ranks(_tied_and_frozen, 4, timeout=200)
