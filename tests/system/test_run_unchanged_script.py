"""A user's unchanged DeepSpeed pipeline script under the real launcher, with and without ext.run."""

import json
import os
import subprocess
import sys

import pytest

from ext.testing.ranks import free_port

pytestmark = [pytest.mark.system, pytest.mark.dist]

SCRIPT = """
import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule


class Block(torch.nn.Module):
    def __init__(self, seed, width):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
net = PipelineModule(
    layers=[LayerSpec(Block, seed, 16) for seed in range(6)], num_stages=2, loss_fn=torch.nn.functional.mse_loss
)
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=[p for p in net.parameters()])
generator = torch.Generator().manual_seed(3)
for step in range(3):
    data = [(torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)) for _ in range(8)]
    loss = engine.train_batch(iter(data))
    if torch.distributed.get_rank() == 0:
        print(type(engine).__name__, loss.item().hex(), flush=True)
torch.distributed.destroy_process_group()  # else threads of gloo may abort the interpreter at its end
"""


def _launch(folder, config, *module):
    (folder / "ds.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(free_port())]
    command += ["--num_accelerators", "2", *module, "train.py", "--deepspeed_config", "ds.json"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)


def test_same_losses_with_and_without(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,  # on by default, with a norm that in stock leaves out the second stage
        "ext": {"pipeline": {"schedule": "shifted_critical_path"}},
    }
    printed = {}
    for module in ((), ("--module", "ext.run")):
        done = _launch(tmp_path, config, *module)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if "Engine 0x" in line]
        printed[module] = ({name for name, _ in lines}, [float.fromhex(loss) for _, loss in lines])
        summaries = [
            line for line in (done.stdout + done.stderr).splitlines() if line.startswith("megatron-deepspeed-ext")
        ]
        assert len(summaries) == (1 if module else 0)
    (stock_engine, stock), (our_engine, ours) = printed.values()
    assert stock_engine == {"PipelineEngine"}
    assert our_engine == {"PlanPipelineEngine"}
    assert len(ours) == 3
    assert ours == pytest.approx(stock, abs=1e-6)
