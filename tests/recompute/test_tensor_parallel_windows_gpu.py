"""Windows under NCCL's all-reduces on two devices: the same gradients, all of it on the stream of the layers."""

import pytest
import torch
import torch.distributed as dist

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.rng import RngStream
from ext.recompute.table import UnitTable, keep_all
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.testing.ranks import run_ranks
from ext.testing.shared_unit_layer import SharedUnitLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TABLE = UnitTable.of({"ln1": "B1", "qkv": "B1", "attention": "B1", "ln2": "B2", "fc1": "B2", "gelu": "B2"})


def windows(rank, world_size):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = TensorParallelGroup.of(dist.new_group(backend="nccl"))
    stream, streams = RngStream(40 + rank, device), set()
    options = {"stream": stream, "dropout": 0.1, "flash": True}
    layers = [SharedUnitLayer(256, 4, group, seed=i, **options).to(device) for i in range(3)]
    start = stream.capture()

    def around():
        streams.add(torch.cuda.current_stream().cuda_stream)
        return torch.enable_grad()

    def step(table):
        stream.restore(start)
        torch.manual_seed(1)
        surroundings = Surroundings(trackers=(stream,), around=around)
        microbatch = MicrobatchUnits(surroundings)
        x = leaf = torch.randn(4, 128, 256, device=device).requires_grad_()
        for layer in layers:
            layer.zero_grad()
            x = microbatch.call(layer, x, table)
        with microbatch.backward():
            x.square().mean().backward()
        gradients = [leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())]
        return gradients, {name: use.units for name, use in surroundings.report.windows.items()}

    expected, _ = step(keep_all([]))
    found, used = step(TABLE)
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), used, len(streams)


def test_windows_on_two_devices():
    for same, used, num_streams in run_ranks(windows, 2):
        assert same
        assert used == {"B1": 9, "B2": 6, "C": 3}
        assert num_streams == 1
