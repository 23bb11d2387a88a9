"""Unit policies under `auto` and from a plan file on Megatron's layers: the bits of no recomputation, budgets kept."""

import os
from pathlib import Path

import pytest
import torch

from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

AUTO = {"type": "auto", "search_seconds": 0.2}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
SLACK = 2048


def _function(schedule, **recompute):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    block = {"pipeline": {"schedule": schedule, "tolerance": 0.0}, **({"recompute": recompute} if recompute else {})}
    return PlanForwardBackward(ExtConfig.from_block(block))


def _step(function):
    from ext.adapters.megatron import testing

    model = testing.build(**DROPOUT)
    testing.seed()
    return testing.train(function, model, testing.batches(6)), testing.gradients(model), torch.get_rng_state()


def _equal(found, expected):
    assert found[0] == expected[0]
    for name, gradient in expected[1].items():
        # where backwards are split, a tied weight's two contributions are added in another order
        atol = 1e-6 if name.startswith("embedding.word") else 0.0
        assert torch.allclose(found[1][name], gradient, rtol=0.0, atol=atol), name
    assert torch.equal(found[2], expected[2])


def _searched(rank, world_size, folder, tp, policies):
    from ext.adapters.megatron import testing
    from ext.planner.search import units
    from ext.recompute.stage_aware import BudgetError

    os.environ["EXT_RUN_DIR"] = folder
    testing.parallel(tp=tp, pp=world_size // tp)
    plain = _function("1f1b", policy="none", memory_budget_gib=1.0)
    expected = _step(plain)
    budgets = [(row.total - 0.3 * row.activations + SLACK) / 2**30 for row in plain.memory]
    search, calls = units.search, []

    def without_whole_layers(space, **options):
        """Measured times of tiny layers would decide between whole layers and units: here whole layers never fit."""
        calls.append(space)
        if len(calls) % 2:
            raise BudgetError("refused")
        return search(space, **options)

    units.search = without_whole_layers
    for policy in policies:
        auto = _function(AUTO, policy=policy, memory_budget_gib=budgets)
        _equal(_step(auto), expected)
        again = _function({"type": "plan_file", "path": str(Path(folder) / "ext_plan.json")})
        torch.distributed.barrier()
        _equal(_step(again), expected)
        assert all(row.total <= budget * 2**30 for row, budget in zip(auto.memory, budgets, strict=True))
        assert auto.describe()["plan_hash"] == again.describe()["plan_hash"]
        tables = auto.tables.stages[rank // tp]
        assert again.tables.stages == auto.tables.stages
        for function in (auto, again):
            assert sum(function.recomputes.values()) == 6 * tables.num_units
            assert function.recompute_report.skipped == 0
        hashes = [None] * world_size
        torch.distributed.all_gather_object(hashes, auto.describe()["plan_hash"])
        assert len(set(hashes)) == 1
        torch.distributed.barrier()
    return tables.num_units


def test_auto_with_units_and_its_file(tmp_path):
    assert any(run_ranks(_searched, 2, str(tmp_path), 1, ["lynx_heu"]))


@pytest.mark.slow
def test_auto_with_units_of_a_tensor_parallel_pipeline(tmp_path):
    policies = ["lynx_heu", {"type": "lynx_opt", "time_limit_s": 0.2}]
    assert any(run_ranks(_searched, 4, str(tmp_path), 2, policies, timeout=120))
