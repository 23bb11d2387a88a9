"""The unit engine on a CUDA device: same gradients, times from events, memory that is really free."""

import pytest
import torch

from ext.recompute.table import drop, keep_all
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.testing.unit_layer import UnitLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, HEADS, SEQ = 256, 4, 128


def step(layers, tables, dtype):
    """Gradients after two interleaved micro-batches, the report, and bytes held after the forwards."""
    for layer in layers:
        layer.zero_grad()
    surroundings, runs, outputs, inputs = Surroundings(), [], [], []
    before = torch.cuda.memory_allocated()
    for number in range(2):
        torch.manual_seed(number)
        x = torch.randn(4, SEQ, HIDDEN, device="cuda", dtype=dtype).requires_grad_()
        inputs.append(x)
        runs.append(MicrobatchUnits(surroundings))
        for layer, table in zip(layers, tables, strict=True):
            x = runs[-1].call(layer, x, table)
        outputs.append(x)
    del x
    held = torch.cuda.memory_allocated() - before
    runs[0].recompute()
    for microbatch in runs:
        torch.manual_seed(99)
        with microbatch.backward():
            outputs.pop(0).float().square().mean().backward()
    gradients = [p.grad.clone() for layer in layers for p in layer.parameters()] + [x.grad for x in inputs]
    return gradients, surroundings.report, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flash", [False, True])
def test_gradients_and_memory(dtype, flash):
    layers = [UnitLayer(HIDDEN, HEADS, dropout=0.1, flash=flash, seed=i, dtype=dtype).cuda() for i in range(3)]
    names = [unit.name for unit in layers[0].units().units]
    expected, nothing, everything = step(layers, [keep_all(names)] * 3, dtype)
    found, report, held = step(layers, [drop(names, "P")] * 3, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert nothing.num_recomputed == 0
    assert report.repeated == 0
    assert set(report.windows) == {"P", "C"}
    assert all(use.seconds > 0 for use in report.windows.values())
    assert everything - held >= 0.9 * report.saved_bytes
