"""Loads and dropped shares reach DeepSpeed's monitor; the balancing bias follows the load of all ranks."""

import csv
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ext.testing.ranks import run_ranks

HIDDEN, EXPERTS = 8, 4


class Layer(nn.Module):
    """An MoE layer whose router prefers expert 0."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, 2, 1, capacity_factor=1.0, min_capacity=1)
        self.moe.deepspeed_moe.gate.wg.weight.data = torch.eye(EXPERTS, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * self.moe(x)[0]


def _train(rank: int, world_size: int, folder: str) -> tuple:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ext
    from ext.adapters.deepspeed import moe

    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
        "ext": {"moe": {"router": {"bias_rate": 0.25}}},
    }
    module = PipelineModule([Layer(), Layer()], num_stages=2, loss_fn=lambda y, _: y.square().mean())
    engine, *_ = ext.initialize(model=module, config=config)
    x = torch.zeros(2, 4, HIDDEN)
    x[..., 0] = 1.0  # every token wants expert 0
    for _ in range(2):
        engine.train_batch(iter([(x, x)]))
    (layer,) = moe.layers_of(engine)
    tag = Path(folder) / "checkpoint"
    engine.save_checkpoint(str(tag))
    saved = layer.router.bias.clone()
    layer.router.bias.zero_()
    engine.load_checkpoint(str(tag))
    dist.barrier()
    return saved.tolist(), layer.router.bias.tolist(), ext.describe(engine)["dispatcher"]


@pytest.mark.dist
def test_monitor_and_bias(tmp_path):
    results = run_ranks(_train, 4, str(tmp_path))
    for saved, loaded, dispatcher in results:
        # First all to expert 0, then, by the bias, all to expert 1.
        assert loaded == saved == [0.0, 0.0, 0.5, 0.5]
        assert dispatcher == "linear"
    written = {path.stem: list(csv.reader(path.open())) for path in (tmp_path / "run").glob("*MoE*")}
    for layer in ("0.moe", "1.moe"):
        name = f"Train_MoE_{layer}"
        # 16 tokens, a capacity of 2 per rank and expert: 12 of 16 dropped in the first step.
        assert written[f"{name}_dropped_share"][1][1] == "0.75"
        assert written[f"{name}_load_max_over_mean"][1][1] == "4.0"
        assert written[f"{name}_load_expert_0"][1][1] == "16.0"
        assert [row[1] for row in written[f"{name}_load_expert_1"][1:]] == ["0.0", "16.0"]
