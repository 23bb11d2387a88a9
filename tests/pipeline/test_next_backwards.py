"""Which backward comes next when a forward runs: the one for which its all-reduces leave time."""

import pytest

from ext.pipeline.build import build_plan
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES


def next_backwards(name, stages, microbatches, stage):
    schedule = SCHEDULES.get(name)(shape=PipelineShape(stages, microbatches))
    plan = build_plan(schedule, layers_per_stage=(1,) * stages, recomputed_layers=(0,) * stages)
    return {m: plan.next_backwards[stage, m] for m in range(microbatches) if (stage, m) in plan.next_backwards}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_forwards_in_flight_come_before_the_backward_of_the_oldest(name):
    # 0: F0 F1 F2 B0 F3 B1 B2 B3; the forward of micro-batch 0 has nothing before it.
    assert next_backwards(name, 3, 4, 0) == {1: 0, 2: 0, 3: 1}
    assert next_backwards(name, 3, 4, 1) == {1: 0, 2: 1, 3: 2}
    # Where each backward follows its own forward there is none to work for.
    assert next_backwards(name, 3, 4, 2) == {}


def test_a_backward_whose_forward_comes_later_is_none():
    # gpipe: all forwards, then the backwards from the last micro-batch to the first, or from the first.
    found = next_backwards("gpipe", 2, 3, 0)
    assert set(found.values()) <= {0, 1, 2}
    assert all(coming < m for m, coming in found.items())
