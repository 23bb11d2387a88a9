"""The heaviest moments of an order hold what the action-by-action count holds, for any sizes."""

import random

import pytest

from ext.pipeline.build import build_plan, full_recompute
from ext.pipeline.costs import Costs, SplitMemory, StageCosts
from ext.pipeline.memory import Load, heaviest_loads, in_flight, peak
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate

NAMES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "zb_h1")


def _stage(rng, recomputes):
    everything = rng.random()
    dropped = everything * rng.random() if recomputes else 0.0
    return StageCosts(
        1,
        1,
        1,
        float(recomputes),
        everything,
        dropped,
        dropped * rng.random(),
        dropped * rng.random() if dropped else 0,
        split=_split(rng, everything, dropped) if rng.random() < 0.8 else None,
    )


def _split(rng, everything, dropped):
    """More or less than the forward keeps; an I may end with more than it ever found."""
    growth, waiting = everything * rng.random(), everything * 1.5 * rng.random()
    growth = max(growth, waiting - everything)
    return SplitMemory(waiting, growth, max(growth + dropped * rng.random(), waiting) if dropped else growth)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (4, 5), (4, 16), (7, 9)])
@pytest.mark.parametrize("recomputes", [True, False])
def test_peaks_equal_the_simulators(name, p, m, recomputes):
    rng = random.Random(f"{name}{p}{m}")
    schedule = SCHEDULES.get(name)(shape=PipelineShape(p, m))
    counts = full_recompute(schedule, [1] * p) if recomputes else (0,) * p
    plan = build_plan(schedule, layers_per_stage=[1] * p, recomputed_layers=counts)
    for _ in range(10):
        costs = Costs(tuple(_stage(rng, count > 0) for count in counts))
        result = simulate(plan, costs)
        for rank in range(p):
            loads = heaviest_loads(plan.orders[rank])
            assert peak(loads, costs.stages[rank]) == pytest.approx(result.peak_activations[rank])
            assert in_flight(loads) == result.peak_in_flight[rank]


def test_an_order_has_few_heaviest_moments():
    """1f1b on rank 1 of 4: three in flight; the last backward of them recomputes inside."""
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(4, 16))
    assert heaviest_loads(schedule.order(1)) == (Load(kept=3, working=1),)


@pytest.mark.parametrize(
    ("p", "m", "ramp"), [(4, 8, [4, 3, 2, 1]), (8, 8, [8, 7, 6, 5, 4, 3, 2, 1]), (4, 2, [2, 2, 2, 1])]
)
def test_in_flight_ramp_of_1f1b(p, m, ramp):
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(p, m))
    assert [in_flight(heaviest_loads(schedule.order(rank))) for rank in range(p)] == ramp
