"""The number of extra warmup forwards of shifted_critical_path follows from the costs."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.pipeline.build import build_plan
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedules.shifted_critical_path import ShiftedCriticalPath
from ext.pipeline.simulate import simulate


def equal(p: int, f: float, backward: float, r: float, latency: float = 0.0) -> Costs:
    stage = StageCosts(f, backward / 2, backward / 2, recompute=r, dropped=1.0)
    return Costs((stage,) * (p - 1) + (replace(stage, recompute=0.0, dropped=0.0),), latency=latency)


def extra(p: int, m: int, costs: Costs | None) -> int:
    return ShiftedCriticalPath(shape=PipelineShape(p, m), costs=costs).num_extra_forwards


def step_time(p: int, m: int, costs: Costs, fixed: int | None = None) -> float:
    config = ShiftedCriticalPath.Config(extra_forwards=fixed)
    schedule = ShiftedCriticalPath(config, shape=PipelineShape(p, m), costs=costs)
    recomputed = tuple(int(stage.recompute > 0) for stage in costs.stages)
    return simulate(build_plan(schedule, layers_per_stage=(1,) * p, recomputed_layers=recomputed), costs).step_time


def test_merak_fixes_it_at_one_and_so_do_we_without_costs():
    assert extra(4, 8, None) == 1
    assert extra(1, 8, equal(2, 1, 2, 1)) == 1


@pytest.mark.parametrize(
    ("backward", "r", "latency", "expected"),
    [
        (2, 1, 0, 1),  # R = B - F, where one is right
        (3, 1, 0, 2),
        (3.1, 1, 0, 3),
        (2, 2, 0, 0),  # nothing left to fill
        (1, 2, 0, 0),
        (2, 1, 0.5, 2),  # the gradient travels there and back
        (2, 0, 0, 0),  # without recompute rank p-2 is not critical
    ],
)
def test_it_fills_the_wait_for_the_first_gradient(backward, r, latency, expected):
    assert extra(4, 16, equal(4, 1, backward, r, latency)) == expected


def test_it_is_clamped_to_the_microbatches_and_an_option_wins():
    assert extra(4, 4, equal(4, 1, 9, 1)) == 2
    config = ShiftedCriticalPath.Config(extra_forwards=3)
    assert ShiftedCriticalPath(config, shape=PipelineShape(4, 16)).num_extra_forwards == 3
    assert ShiftedCriticalPath(config, shape=PipelineShape(4, 4)).num_extra_forwards == 2


def test_a_heavy_last_stage_needs_no_extra_forwards():
    costs = equal(4, 1, 2, 1)
    heavy = replace(costs, stages=(*costs.stages[:3], StageCosts(2, 2, 2)))
    assert extra(4, 16, heavy) == 0


def test_earlier_ranks_run_ahead_too_so_that_rank_p_minus_2_finds_its_inputs():
    schedule = ShiftedCriticalPath(ShiftedCriticalPath.Config(extra_forwards=3), shape=PipelineShape(5, 8))
    assert [schedule.max_in_flight(rank) for rank in range(5)] == [5, 5, 5, 5, 1]
    early = [sorted(i for _, i in schedule.early_recomputes(rank)) for rank in range(5)]
    assert early == [[0, 4, 5, 6, 7], [0, 1, 5, 6, 7], [0, 1, 2, 6, 7], [0, 1, 2, 3], []]


@given(p=st.integers(2, 8), m=st.integers(4, 16), r=st.floats(0.5, 2), backward=st.floats(0.5, 5))
def test_rank_p_minus_2_never_waits_where_a_recompute_is_as_long_as_a_forward(p, m, r, backward):
    costs = equal(p, r, backward, r)
    k = extra(p, m, costs)
    if k == m - 2:
        return
    assert step_time(p, m, costs) == pytest.approx(m * (2 * r + backward) + (p - 2) * (r + backward))
    assert all(step_time(p, m, costs) <= step_time(p, m, costs, fixed) * (1 + 1e-9) for fixed in range(5))
    assert k == 0 or step_time(p, m, costs, k - 1) > step_time(p, m, costs) * (1 + 1e-9)


def test_on_other_times_it_is_close_to_the_best_of_five():
    chance = random.Random(7)
    losses = []
    for _ in range(60):
        p, m = chance.randint(2, 8), chance.randint(8, 20)
        r, backward, latency = chance.uniform(0.3, 1.5), chance.uniform(1, 3), chance.choice([0, 0, 0.1])
        costs = equal(p, 1, backward, r, latency)
        best = min(step_time(p, m, costs, fixed) for fixed in range(5))
        losses.append(step_time(p, m, costs) / best - 1)
    assert max(losses) < 0.04
    assert mean(losses) < 0.005
