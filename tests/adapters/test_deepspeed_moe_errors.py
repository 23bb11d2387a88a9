"""What one expert-parallel group alone sees ends every rank, by name, inside and outside of a pipeline."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ext.core.errors import ConfigError, RoutingError
from ext.runtime import alarm
from ext.testing.ranks import RanksFailed, run_ranks

HIDDEN, EXPERTS = 8, 4
pytestmark = pytest.mark.dist


class Block(nn.Module):
    """Linear, MoE over two ranks; the logits of ``bad_rank`` are NaN from its forward number ``bad_call`` on."""

    def __init__(self, bad_rank: int, bad_call: int = 0) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, 2, k=2, drop_tokens=False)
        self.bad_rank, self.bad_call, self.calls = bad_rank, bad_call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if dist.get_rank() == self.bad_rank and self.calls >= self.bad_call:
            x = x * float("nan")
        self.calls += 1
        return self.moe(x)[0]


class Uneven(nn.Module):
    """Six experts over four ranks: DeepSpeed's layer refuses that by an assertion."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), 6, 4)


def _refuses_uneven_experts() -> None:
    """A layer of one stage: the same error on all of them."""
    from deepspeed.pipe import LayerSpec

    import ext

    layers = [LayerSpec(nn.Linear, HIDDEN, HIDDEN), LayerSpec(Uneven)]
    block = {"pipeline": {"partition": "uniform"}, "moe": {"dispatcher": "linear"}}
    config = {"train_micro_batch_size_per_gpu": 1, "ext": block}
    with pytest.raises(ConfigError) as error:
        ext.pipeline_module(layers, config=config, num_stages=2, loss_fn=nn.MSELoss())
    assert str(error.value) == (
        "layer 1 (Uneven) cannot be built: Number of experts (6) should be divisible by expert parallel size (4)"
    )


def _trains_alone(rank: int, world_size: int, folder: str) -> None:
    """Without a pipeline: ranks 2 and 3 go on to reduce their gradients with ranks that are no longer there."""
    import deepspeed

    import ext

    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ext": {"moe": {"dispatcher": "linear"}},
    }
    _refuses_uneven_experts()
    engine = ext.initialize(model=Block(bad_rank=1), config=config)[0]
    engine.backward(engine(torch.ones(4, HIDDEN)).sum())
    engine.step()


def test_without_a_pipeline(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_trains_alone, 4, str(tmp_path), timeout=60)
    error = "MoE layer moe: the router's logits are NaN or infinite on rank 1: 4 of 4 tokens."
    assert sorted(failed.value.failures) == [0, 1, 2, 3]
    for rank in (0, 1):
        assert error in str(failed.value.errors[rank])
    for rank in (2, 3):
        assert f"rank {rank} stops, as rank " in Path(tmp_path, f"stderr{rank}").read_text()
        assert error in Path(tmp_path, f"stderr{rank}").read_text()


def _trains_in_a_pipeline(rank: int, world_size: int) -> list[str]:
    """Two stages with an expert-parallel group each; the error is the same on all ranks, and it is not the end."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ext

    os.dup2(2, 1)
    alarm.GRACE_S = 60.0  # on a machine of any speed all ranks come together before
    deepspeed.init_distributed("gloo", verbose=False)
    layers = [LayerSpec(Block, bad_rank=0, bad_call=2), LayerSpec(Block, bad_rank=-1)]
    module = PipelineModule(
        layers, num_stages=2, loss_fn=lambda out, label: (out - label).square().mean(), partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ext": {"moe": {"dispatcher": "linear"}, "pipeline": {"schedule": "1f1b"}},
    }
    engine = ext.initialize(model=module, config=config)[0]
    texts = []
    for _ in range(2):
        data = iter([(torch.ones(4, HIDDEN), torch.zeros(4, HIDDEN))] * 4)
        with pytest.raises(RoutingError) as error:
            engine.train_batch(data)
        texts.append(str(error.value))
    return texts


@pytest.mark.slow
def test_in_a_pipeline():
    results = run_ranks(_trains_in_a_pipeline, 4, timeout=60)
    error = "MoE layer 0.moe: the router's logits are NaN or infinite on rank 0: 4 of 4 tokens."
    for texts in results:
        assert all(error in text for text in texts), texts
