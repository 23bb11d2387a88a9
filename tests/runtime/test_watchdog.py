"""A rank that hangs ends the run, and every rank says where it was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ext
from ext.runtime.watchdog import EXIT_STUCK
from ext.testing.ranks import RanksFailed, run_ranks
from ext.testing.tiny_gpt import HIDDEN, TinyEmbedding, TinyHead, token_batch, token_loss

pytestmark = pytest.mark.dist

SECONDS = 3


class SleepsOnThird(nn.Module):
    """Hangs in the forward of micro-batch 2 on the stage that holds it."""

    def __init__(self, sleep: float) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.sleep, self.calls = sleep, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            time.sleep(self.sleep)
        return self.linear(x)


def _train(rank: int, world_size: int, folder: str, sleep: float) -> float:
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    deepspeed.init_distributed("gloo")
    specs = [LayerSpec(TinyEmbedding, 7), LayerSpec(SleepsOnThird, sleep), LayerSpec(TinyHead, 8)]
    module = PipelineModule(layers=specs, num_stages=3, loss_fn=token_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ext": {"pipeline": {"schedule": "1f1b"}, "watchdog": SECONDS},
    }
    engine: Any = ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    loss = engine.train_batch(iter([token_batch(i) for i in range(5)]))
    time.sleep(SECONDS + 2)  # between steps a rank may take any time
    return loss.item()


def test_every_rank_reports_where_it_hangs(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_train, 3, str(tmp_path), 600.0)
    assert sorted(failed.value.failures) == [0, 1, 2]
    assert all(f"exit code {EXIT_STUCK}" in text for text in failed.value.failures.values())
    reports = [Path(tmp_path, f"stderr{rank}").read_text() for rank in range(3)]
    for rank, report in enumerate(reports):
        assert f"watchdog: rank {rank} has made no progress" in report
    assert "doing: 0B1, waiting for micro-batch 1 of gradient from rank 1\n" in reports[0]
    assert "last finished: 0SEND_F3\n" in reports[0]
    assert "doing: 1F2\n" in reports[1]
    assert "last finished: 1SEND_B0\n" in reports[1]
    assert "in forward" in reports[1], "the stack shows the layer"
    assert "doing: 2F2, waiting for micro-batch 2 of stage input from rank 1\n" in reports[2]
    assert "last finished: 2SEND_B1\n" in reports[2]


def test_a_slow_step_and_time_between_steps_are_no_hang(tmp_path):
    losses = run_ranks(_train, 3, str(tmp_path), SECONDS / 3)
    assert len(set(losses)) == 1
    assert not any("watchdog" in Path(tmp_path, f"stderr{rank}").read_text() for rank in range(3))
