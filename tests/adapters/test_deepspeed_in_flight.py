"""Micro-batches in flight in a real run, counted by hooks and by what stays in memory, against the simulator."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ext
from ext.core.replay import is_replaying
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

WIDTH = 8
NUM_STAGES = 4
STEPS = 2


class Block(nn.Linear):
    """Keeps its input for the backward, and until W where that is apart."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class InFlight:
    """Watches the first layer of a stage.

    Attributes:
        peak: most micro-batches whose forward has begun and whose weight gradient is not yet there.
        peak_alive: most inputs of the layer that are in memory at once.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.now = self.peak = self.alive = self.peak_alive = 0
        layer.register_forward_pre_hook(self._forward)
        layer.weight.register_post_accumulate_grad_hook(self._gradient)

    def _forward(self, layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if not torch.is_grad_enabled() or is_replaying():
            return
        self.now += 1
        self.alive += 1
        weakref.finalize(inputs[0].untyped_storage(), self._freed)
        self.peak, self.peak_alive = max(self.peak, self.now), max(self.peak_alive, self.alive)

    def _gradient(self, weight: torch.Tensor) -> None:
        self.now -= 1

    def _freed(self) -> None:
        self.alive -= 1


def _batches(num: int) -> Any:
    return iter([(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(num)])


def _in_flight(rank: int, world_size: int, cases: list[tuple[str, Any, int]]) -> list[tuple[Any, ...]]:
    deepspeed.init_distributed("gloo")
    found = []
    for name, policy, m in cases:
        layers = [LayerSpec(Block) for _ in range(2 * world_size)]
        module = PipelineModule(
            layers=layers, num_stages=world_size, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        block: dict[str, Any] = {"pipeline": {"schedule": name}}
        if policy is not None:
            block["recompute"] = {"policy": policy}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": m,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "ext": block,
        }
        engine = ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        seen = InFlight(module.forward_funcs[0])
        for _ in range(STEPS):
            engine.train_batch(_batches(m))
        engine.eval_batch(_batches(m))
        recompute = [bool(count) for count in engine.plan.recomputed_layers]
        costs = Costs(tuple(StageCosts(1, 1, 1, recompute=again) for again in recompute))
        expected = simulate(engine.plan, costs).peak_in_flight[rank]
        found.append((name, policy, m, expected, seen.peak, seen.peak_alive, seen.now, seen.alive))
    return found


def test_activations_alive_are_as_many_as_the_simulator_says():
    cases = [
        (name, policy, m)
        for name, policy, m in itertools.product(SCHEDULES, (None, "none", "full"), (8, 2))
        if SCHEDULES.get(name).has_rule and m >= SCHEDULES.get(name).min_microbatches
    ]
    by_rank = run_ranks(_in_flight, NUM_STAGES, cases, timeout=150)
    for rank, found in enumerate(by_rank):
        for name, policy, m, expected, peak, peak_alive, left, left_alive in found:
            case = f"rank {rank}, {name}, {policy}, {m} micro-batches"
            assert peak == expected, case
            assert peak_alive == expected, case
            assert (left, left_alive) == (0, 0), case
    peaks = {m: [found[i][4] for found in by_rank] for i, (name, policy, m) in enumerate(cases) if name == "1f1b"}
    assert peaks == {8: [4, 3, 2, 1], 2: [2, 2, 2, 1]}
