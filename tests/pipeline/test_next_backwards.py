"""Which backward comes next when a forward runs: the one for which its all-reduces leave time."""

import pytest

from ext.pipeline.actions import parse_order
from ext.pipeline.build import build_plan
from ext.pipeline.plan import PipelineShape, Plan
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


def test_no_recompute_of_another_kind_runs_under_a_forward():
    orders = ("0F0 0F1 0I0 0F2 0W0 0B1 0F3 0I2 0W2 0I3 0W3", "1F0 1I0 1W0 1F1 1B1 1F2 1I2 1W2 1F3 1I3 1W3")
    plan = Plan("auto", 4, (0, 1), tuple(tuple(parse_order(order)) for order in orders), (1, 1), (0, 0))
    assert plan.next_backwards == {(0, 1): 0, (0, 2): 1, (0, 3): 2}
    # Micro-batch 1 is the only one whose backward is whole.
    assert [plan.next_backward(0, m) for m in range(4)] == [None, None, None, 2]
    whole = SCHEDULES.get("1f1b")(shape=PipelineShape(2, 3))
    plan = build_plan(whole, layers_per_stage=(1, 1), recomputed_layers=(0, 0))
    assert [plan.next_backward(0, m) for m in range(3)] == [None, 0, 1]
