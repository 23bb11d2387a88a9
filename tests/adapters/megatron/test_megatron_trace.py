"""The trace of Megatron's training steps: what the plan says, one row per stage, as on DeepSpeed."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ext.core.errors import ConfigError
from ext.pipeline.chrome import read_trace, trace_problems
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

M = 4


def _function(schedule, path, **recompute):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    block = {"pipeline": {"schedule": schedule}, "trace": {"path": path, "steps": [1, 2]}}
    return PlanForwardBackward(ExtConfig.from_block(block | recompute), lambda key: f"--ext-{key}")


def _train(rank, world_size, folder):
    from megatron.core import parallel_state

    from ext.adapters.megatron import testing

    testing.parallel(pp=2)
    data = testing.batches(M, start=10 * parallel_state.get_data_parallel_rank())
    plans = {}
    for schedule in ("shifted_critical_path", "zb_h1"):
        model = testing.build()
        function = _function(schedule, f"{folder}/{schedule}.json", recompute={"policy": [2, 0]})
        for _ in range(4):
            testing.train(function, model, data)
            testing.run(function, model, data, forward_only=True)
        plans[schedule] = function.plan
    with pytest.raises(ConfigError, match=r"--ext-trace\.path: .* cannot be written: .* Name another file"):
        testing.train(_function("1f1b", folder), testing.build(), data)
    return plans


def test_chosen_steps_are_written_as_the_plan_ran(tmp_path):
    plans = run_ranks(_train, 4, str(tmp_path))[0]
    for schedule, plan in plans.items():
        path = Path(tmp_path, f"{schedule}.json")
        assert trace_problems(json.loads(path.read_text())) == []
        found = read_trace(path)
        assert (found.source, found.plan) == ("measured", plan)
        assert [trace.step for trace in found.steps] == [1, 2]
        for trace in found.steps:
            assert len(trace.rows) == 2
            for rank, row in enumerate(trace.rows):
                ran = [(s.name, s.microbatch) for s in sorted(row, key=lambda s: s.end) if s.is_compute]
                planned = [(a.kind.value, a.microbatch) for a in plan.orders[rank] if a.kind.value in "FBIWR"]
                assert ran == planned, (schedule, rank)
                names = Counter(span.name for span in row)
                assert names["OPTIMIZER"] == 1
                assert names["RECV_B" if rank == 0 else "RECV_F"] == M
                # what the plan recomputes inside a backward is shown where it stands
                early = {a.microbatch for a in plan.orders[rank] if a.kind.value == "R"}
                inline = [s for s in row if s.inline]
                assert len(inline) == plan.recomputed_layers[rank] * (M - len(early))
