"""The memory of Megatron's stages: predicted beside measured, and what an error says where it was too much."""

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from ext.core.errors import OutOfMemoryError
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

M = 4
SIZES = {"num_layers": 6, "hidden_size": 64, "ffn_hidden_size": 256}
CASES = {
    "early": ("early_recompute", "full", torch.float32),
    "split": ("zb_h1", None, torch.float32),
    "units": ("1f1b", {"policy": "lynx_heu", "memory_budget_gib": [3.2 / 1024, 3.0 / 1024]}, torch.float32),
    "bf16": ("1f1b", [1, 0], torch.bfloat16),
}


def _function(schedule, recompute=None):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    block = {"pipeline": {"schedule": schedule}}
    if recompute is not None:
        block["recompute"] = recompute if isinstance(recompute, dict) else {"policy": recompute}
    return PlanForwardBackward(ExtConfig.from_block(block))


def _optimizer(model):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bf16 = model.config.bf16
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, bf16=bf16), [model])
    model.config.grad_scale_func = optimizer.scale_loss  # as Megatron's training code does
    return optimizer


def _run(rank, world_size, folder):
    from ext.adapters.megatron import testing

    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    testing.parallel(pp=2)
    data, rows = testing.batches(M), {}
    for name, (schedule, recompute, dtype) in CASES.items():
        model = testing.build(**SIZES, dtype=dtype)
        function, optimizer = _function(schedule, recompute), _optimizer(model)
        assert function.memory == []
        losses = testing.train(function, model, data)
        assert all(row.measured is None for row in function.memory)
        if name == "units":  # counting changes no number
            assert testing.train(_function("1f1b"), testing.build(**SIZES), data) == losses
        optimizer.step()
        testing.run(function, model, data, forward_only=True)
        rows[name] = function.memory
        testing.train(function, model, data)
        assert function.memory == rows[name]
    return rows, _too_much(rank, data)


def _too_much(rank, data):
    """What is said where memory is not enough: in a step, and of a budget that a step did not keep."""
    from ext.adapters.megatron import testing

    def fails(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    texts = []
    for block in (None, {"policy": "stage_aware", "memory_budget_gib": 0.01}):
        function, model = _function("1f1b", block), testing.build(**SIZES)
        testing.train(function, model, data)
        step = fails if rank == 1 else testing.forward_step
        with mock.patch.object(testing, "forward_step", step), pytest.raises(OutOfMemoryError) as error:
            testing.train(function, model, data)
        texts.append(str(error.value))
    model = testing.build(**SIZES)
    function = _function("1f1b", {"policy": "stage_aware", "memory_budget_gib": 0.01})
    testing.train(function, model, data)
    function._plans.rows[0] = replace(function._plans.rows[0], budget=1000)
    with pytest.raises(OutOfMemoryError) as error:
        testing.train(function, model, data)
    return [*texts, str(error.value)]


def test_predicted_beside_measured_and_what_is_said_of_too_much(tmp_path):
    results = run_ranks(_run, 2, str(tmp_path), env={"EXT_MEMORY_REPORT": "1"})
    assert results[0] == results[1]
    rows, texts = results[0]
    for name, stages in rows.items():
        for row in stages:
            assert row.measured <= row.total, (name, row)
            # What units bring back is bounded; how much of it there is depends on tables made from measured times.
            least = 0.9 if name == "units" else 0.99
            assert least * row.live <= row.measured <= 1.01 * row.live, (name, row)
    assert [row.recomputed for row in rows["bf16"]] == [1, 0]
    shown = "".join(Path(tmp_path, f"stderr{rank}").read_text() for rank in range(2))
    assert "predicted memory per stage in " in shown
    assert "measured memory per stage in " in shown
    for text in texts[:2]:
        assert re.match(r"stage 1 ran out of memory: [\d.]+ MiB were predicted, [\d.]+ MiB were measured", text), text
        assert "DefaultCPUAllocator" in text
    assert "the budget is 10.240 MiB. Nearest change that fits: ext.recompute.policy " in texts[1]
    found = re.match(r"stage 0 held more than its budget: (\S+ \S+) were predicted, (\S+ \S+) were measured", texts[2])
    assert found, texts[2]
    assert "Nearest change that fits: ext.recompute.policy " in texts[2]
