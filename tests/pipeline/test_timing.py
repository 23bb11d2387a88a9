"""Action codes and the lean core that searches call."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.pipeline.actions import COMPUTE_KINDS, Action, B, F, I, R, W, parse_order
from ext.pipeline.build import build_plan, full_recompute
from ext.pipeline.codes import ActionCodes, action_codes
from ext.pipeline.costs import Costs, SplitMemory, StageCosts
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.pipeline.timing import OrderCosts

STAGE = StageCosts(1, 2, 4, recompute=8, activations=10, dropped=6, stash=1, working_set=2)


@given(st.integers(1, 6), st.integers(1, 6))
def test_codes_are_distinct_and_read_back(num_stages, num_microbatches):
    codes = ActionCodes(range(num_stages), num_microbatches)
    every = [
        (Action(stage, kind, i), inline)
        for kind in COMPUTE_KINDS
        for inline in ([True, False] if kind in (B, I) else [False])
        for stage in range(num_stages)
        for i in range(num_microbatches)
    ]
    numbers = [codes.code(action, inline) for action, inline in every]
    assert sorted(numbers) == list(range(len(every)))
    assert [codes.decode(number) for number in numbers] == every
    assert len(codes.waits_for) == len(codes.fills) == len(every)


def test_encoding_tells_inline_recomputes_apart():
    codes = action_codes((0, 1), 3)
    order = parse_order("0F0 0SEND_F0 0F1 0R0 0RECV_B0 0B0 0B1 0F2 0R2 0I2 0W2")
    decoded = [(str(action), inline) for action, inline in map(codes.decode, codes.encode(order))]
    expected = "0F0 0F1 0R0 0B0 0B1 0F2 0R2 0I2 0W2"
    assert decoded == [(text, text == "0B1") for text in expected.split()]
    assert action_codes((0, 1), 3) is codes


def test_durations_and_sizes_by_operation():
    model = OrderCosts(Costs((STAGE,)), (0,), 1)
    code = model.codes.code

    def of(kind, inline=False):
        number = code(Action(0, kind, 0), inline)
        return model.duration[number], model.adds[number], model.holds[number], model.frees[number]

    kept = 10 - 6 + 1
    assert of(F) == (1, kept, 0, 0)
    assert of(R) == (8, 6, 0, 0)
    assert of(B) == (6, 0, 0, kept + 6)
    assert of(B, inline=True) == (14, 0, 2, kept)
    assert of(I) == (2, 0, 0, 1)
    assert of(I, inline=True) == (10, 0, 6, kept - 10)
    assert of(W) == (4, 0, 0, 10)


def test_sizes_where_it_is_known_what_waits():
    stage = replace(STAGE, split=SplitMemory(waiting=12, growth=3, working_set=5))
    model = OrderCosts(Costs((stage,)), (0,), 1)

    def of(kind, inline=False):
        number = model.codes.code(Action(0, kind, 0), inline)
        return model.adds[number], model.holds[number], model.frees[number]

    assert of(I) == (0, 3, 11 - 12)
    assert of(I, inline=True) == (0, 5, 5 - 12)
    assert of(W) == (0, 0, 12)
    assert of(B, inline=True) == (0, 2, 5)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES.get(name).has_rule])
@pytest.mark.parametrize("again", [True, False])
def test_the_lean_core_agrees_with_the_full_simulation(name, again):
    schedule = SCHEDULES.get(name)(shape=PipelineShape(4, 6))
    recomputed = full_recompute(schedule, (1,) * 4) if again else (0,) * 4
    stages = tuple(STAGE if n else StageCosts(1, 2, 4, activations=10) for n in recomputed)
    costs = Costs(stages, latency=0.3)
    plan = build_plan(schedule, layers_per_stage=(1,) * 4, recomputed_layers=recomputed)
    result = simulate(plan, costs)
    model = OrderCosts(costs, plan.rank_of, 6)
    orders = [model.codes.encode(order) for order in plan.orders]
    assert model.step_time(orders) == result.step_time
    assert tuple(model.peak(order) for order in orders) == result.peak_activations
    assert model.step_time(orders) == model.step_time(orders)
    # All that was added is freed.
    assert all(math.fsum(model.adds[c] - model.frees[c] for c in o) == pytest.approx(0) for o in orders)


def test_orders_that_wait_for_ever_never_end():
    model = OrderCosts(Costs((STAGE, STAGE)), (0, 1), 2)
    good = [model.codes.encode(parse_order(o)) for o in ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")]
    bad = [model.codes.encode(parse_order(o)) for o in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")]
    assert model.step_time(good) < math.inf
    assert model.step_time(bad) == math.inf
    assert model.run([good[0], []])[0] == [math.inf, 0.0]
