"""The simulator against closed forms, published peaks and a slow, obvious reference."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.core.errors import ScheduleError
from ext.pipeline.actions import B, F, I, R, W, parse_order
from ext.pipeline.build import build_plan, default_recompute, full_recompute
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import Simulation, simulate

NAMES = tuple(name for name in SCHEDULES if SCHEDULES.get(name).has_rule)
LAYERS = 8


def run(name: str, p: int, m: int, *, f=1.0, b=1.0, w=1.0, r=1.0, policy="full", latency=0.0, **options) -> Simulation:
    """Equal stages of 8 layers, activations 1 per stage, stash 0.06; the schedule knows the costs."""
    cls, shape, layers = SCHEDULES.get(name), PipelineShape(p, m), (LAYERS,) * p
    choose = {"full": full_recompute, "default": default_recompute, "none": lambda s, n: (0,) * len(n)}[policy]
    recomputed = choose(cls(shape=shape), layers)
    layer = LayerCosts(f / LAYERS, b / LAYERS, w / LAYERS, r / LAYERS, 1 / LAYERS, 0.06 / LAYERS)
    costs = Costs(stage_costs(layer, layers, recomputed), latency=latency)
    schedule = cls(cls.Config(**options), shape=shape, costs=costs)  # type: ignore[call-arg]
    return simulate(build_plan(schedule, layers_per_stage=layers, recomputed_layers=recomputed), costs)


def hand_plan(*orders: str, m: int, rank_of=None, recomputed=None) -> Plan:
    rank_of = rank_of or tuple(range(len(orders)))
    n = len(rank_of)
    return Plan("x", m, rank_of, tuple(tuple(parse_order(o)) for o in orders), (1,) * n, recomputed or (0,) * n)


@pytest.mark.parametrize(
    ("name", "policy", "p4_m8", "p8_m32"),
    [
        ("1f1b", "full", 44, 156),
        ("gpipe", "full", 44, 156),
        ("early_recompute", "full", 41, 149),
        ("last_no_recompute", "full", 39, 147),
        ("shifted_critical_path", "full", 38, 146),
        ("1f1b", "none", 33, 117),
        ("gpipe", "none", 33, 117),
        ("zb_h1", "none", 27, 104.4),
        ("zb_h1", "full", 38, 143.4),
    ],
)
def test_published_step_times(name, policy, p4_m8, p8_m32):
    assert run(name, 4, 8, policy=policy).step_time == pytest.approx(p4_m8)
    assert run(name, 8, 32, b=1.1, w=0.9, policy=policy).step_time == pytest.approx(p8_m32)


@pytest.mark.parametrize("name", NAMES)
def test_default_policy_is_the_schedules(name):
    merak = name in ("early_recompute", "last_no_recompute", "shifted_critical_path")
    expected = run(name, 4, 8, policy="full" if merak else "none")
    assert run(name, 4, 8, policy="default").step_time == expected.step_time


@given(
    p=st.integers(1, 8),
    m=st.integers(1, 32),
    f=st.floats(0.1, 3),
    b=st.floats(0.1, 3),
    w=st.floats(0.1, 3),
    r=st.floats(0.1, 3),
)
def test_closed_forms_of_1f1b_and_gpipe(p, m, f, b, w, r):
    for name in ("1f1b", "gpipe"):
        assert run(name, p, m, f=f, b=b, w=w, r=r).step_time == pytest.approx((m + p - 1) * (f + r + b + w))
        none = run(name, p, m, f=f, b=b, w=w, policy="none")
        assert none.step_time == pytest.approx((m + p - 1) * (f + b + w))


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("m", range(4, 17))
def test_closed_forms_of_the_merak_family(p, m):
    f, r, backward = 1, 1, 2
    # The rules are clamped to the micro-batches at hand and hold for m < p too.
    assert run("early_recompute", p, m).step_time == m * (f + r + backward) + (p - 1) * (f + backward)
    last = m * (f + r + backward) + (p - 2) * (f + backward) + backward - r
    assert run("last_no_recompute", p, m).step_time == last
    expected = m * (f + r + backward) + (p - 2) * (f + backward)
    assert run("shifted_critical_path", p, m).step_time == expected


@given(p=st.integers(2, 8), m=st.integers(4, 24), f=st.floats(0.5, 2), b=st.floats(0.5, 2), share=st.floats(0.1, 1))
def test_closed_forms_of_early_recomputation_at_any_times(p, m, f, b, share):
    times = {"f": f, "b": b, "w": f}
    early = run("early_recompute", p, m, r=share * f, **times).step_time
    assert early == pytest.approx(m * (f + share * f + b + f) + (p - 1) * (f + b + f))
    last = run("last_no_recompute", p, m, r=f, **times).step_time
    assert last == pytest.approx(m * (f + f + b + f) + (p - 2) * (f + b + f) + b)


@given(p=st.integers(2, 8), extra=st.integers(0, 24), f=st.floats(0.5, 2), b=st.floats(0.5, 2), w=st.floats(0.5, 2))
def test_closed_forms_of_zb_h1_where_w_is_no_longer_than_f_and_i(p, extra, f, b, w):
    w = min(w, f, b)
    m = p + extra
    none = run("zb_h1", p, m, f=f, b=b, w=w, policy="none").step_time
    assert none == pytest.approx(m * (f + b + w) + (p - 1) * (f + b - w))
    full = run("zb_h1", p, m, f=f, b=b, w=w, r=f).step_time
    assert full == pytest.approx(m * (f + f + b + w) + (p - 1) * (f + b + f - w))


@pytest.mark.parametrize(
    ("name", "policy", "peaks"),
    [
        ("1f1b", "none", [4, 3, 2, 1]),
        ("1f1b", "full", [0.365, 0.305, 0.245, 0.185]),
        ("early_recompute", "full", [1.18, 1.12, 1.06, 0.185]),
        ("shifted_critical_path", "full", [1.18, 1.18, 1.18, 1.0]),
        ("zb_h1", "none", [4, 4, 4, 4]),
        ("zb_h1", "full", [1.24, 2.18, 3.12, 4.06]),
    ],
)
def test_published_peaks_of_p4_m8(name, policy, peaks):
    assert run(name, 4, 8, policy=policy).peak_activations == pytest.approx(peaks)


def test_in_flight_peaks():
    assert run("1f1b", 4, 8).peak_in_flight == (4, 3, 2, 1)
    assert run("1f1b", 8, 8).peak_in_flight == (8, 7, 6, 5, 4, 3, 2, 1)
    assert run("1f1b", 4, 2).peak_in_flight == (2, 2, 2, 1)
    assert run("gpipe", 3, 5).peak_in_flight == (5, 5, 5)
    assert run("shifted_critical_path", 4, 8).peak_in_flight == (4, 3, 3, 1)
    assert run("zb_h1", 4, 8).peak_in_flight == (4, 4, 4, 4)


def test_shares_and_busy_times():
    scp = run("shifted_critical_path", 4, 8)
    assert scp.busy == (32, 32, 32, 24)
    assert scp.recompute == (8, 8, 8, 0)
    assert scp.bubble_share == pytest.approx(1 - 120 / (4 * 38))
    assert scp.recompute_share == pytest.approx(24 / (4 * 38))
    assert run("1f1b", 1, 4, policy="none").bubble_share == 0


def test_times_of_every_action_of_a_small_plan():
    plan = hand_plan("0F0 0F1 0R0 0B0 0B1", "1F0 1I0 1F1 1B1 1W0", m=2, recomputed=(1, 0))
    dropping = StageCosts(2, 1, 1, recompute=3, activations=4, dropped=3, stash=0.5, working_set=1, message=6)
    keeping = StageCosts(2, 3, 1, activations=4)
    result = simulate(plan, Costs((dropping, keeping), latency=0.5, bandwidth=4))
    # A message takes 0.5 + 6/4 = 2 in both directions.
    assert [(str(t.action), t.start, t.end, t.recompute) for t in result.timeline[0]] == [
        ("0F0", 0, 2, 0),
        ("0F1", 2, 4, 0),
        ("0R0", 4, 7, 3),
        ("0B0", 11, 13, 0),
        ("0B1", 17, 22, 3),
    ]
    assert [(str(t.action), t.start, t.end, t.recompute) for t in result.timeline[1]] == [
        ("1F0", 4, 6, 0),
        ("1I0", 6, 9, 0),
        ("1F1", 9, 11, 0),
        ("1B1", 11, 15, 0),
        ("1W0", 15, 16, 0),
    ]
    assert result.step_time == 22
    assert result.busy == (14, 12)
    # Rank 0: two micro-batches keep 1.5 each, R adds 3. Rank 1: both are whole until B1 ends, W0 is last.
    assert result.peak_activations == (6, 8)
    assert result.peak_in_flight == (2, 2)


def test_an_input_gradient_with_the_recompute_inside_holds_it_until_its_weight_gradient():
    stage = StageCosts(1, 1, 1, recompute=1, activations=10, dropped=8, stash=1, working_set=2)
    result = simulate(hand_plan("0F0 0I0 0F1 0W0 0B1", m=2, recomputed=(1,)), Costs((stage,)))
    # F keeps 3; I0 adds 8 and frees the stash: 10; F1 makes it 13; after W0 B1 runs at 3 + 2.
    assert result.peak_activations == (13,)
    assert [t.recompute for t in result.timeline[0]] == [0, 1, 0, 0, 1]
    assert simulate(hand_plan("0F0 0B0", m=1, recomputed=(1,)), Costs((stage,))).peak_activations == (5,)


def test_messages_inside_a_rank_take_no_time():
    stage = StageCosts(1, 1, 1, message=5)
    plan = hand_plan("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", m=1, rank_of=(0, 1, 1, 0))
    assert simulate(plan, Costs((stage,) * 4, latency=1)).step_time == 4 * 3 + 4 * 1
    assert simulate(plan, Costs((stage,) * 4, latency=1, bandwidth=5)).step_time == 4 * 3 + 4 * 2


def test_latency_of_1f1b_is_paid_on_the_way_down_and_up():
    # One micro-batch: p-1 messages each way.
    assert run("1f1b", 4, 1, policy="none", latency=0.25).step_time == pytest.approx(4 * 3 + 6 * 0.25)


def test_communication_in_the_plan_does_not_change_times():
    for name in NAMES:
        result = run(name, 4, 6)
        bare = tuple(result.plan.compute_order(rank) for rank in range(4))
        plan = Plan(name, 6, (0, 1, 2, 3), bare, (8,) * 4, result.plan.recomputed_layers)
        layer = LayerCosts(1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 0.06 / 8)
        again = simulate(plan, Costs(stage_costs(layer, (8,) * 4, plan.recomputed_layers)))
        assert again.timeline == result.timeline


def reference(plan: Plan, costs: Costs) -> dict:
    """End of every action by relaxation: sweep until nothing changes. Slow, and free of events and codes."""
    end: dict = {}
    travel = {s: costs.latency + costs.stages[s].message / costs.bandwidth for s in range(plan.num_stages)}
    changed = True
    while changed:
        changed = False
        for rank, order in enumerate(plan.orders):
            now = 0.0
            for action in filter(lambda a: a.kind.is_compute, order):
                stage, kind, i = action
                ready = 0.0
                if kind is F and stage > 0:
                    hop = travel[stage - 1] if plan.rank_of[stage - 1] != rank else 0.0
                    ready = end.get((stage - 1, "F", i), 0.0) + hop
                if kind in (B, I) and stage + 1 < plan.num_stages:
                    hop = travel[stage] if plan.rank_of[stage + 1] != rank else 0.0
                    before = max(end.get((stage + 1, k, i), 0.0) for k in "BI")
                    ready = before + hop
                cost = costs.stages[stage]
                inline = cost.recompute if (stage, i) not in plan.early_recomputes else 0.0
                length = {
                    F: cost.forward,
                    R: cost.recompute,
                    W: cost.weight_grad,
                    B: cost.input_grad + cost.weight_grad + inline,
                    I: cost.input_grad + inline,
                }[kind]
                now = max(now, ready) + length
                if end.get((stage, kind.value, i)) != now:
                    end[stage, kind.value, i] = now
                    changed = True
    return end


stage_numbers = st.builds(
    StageCosts,
    forward=st.floats(0.1, 3),
    input_grad=st.floats(0.1, 3),
    weight_grad=st.floats(0, 3),
    recompute=st.floats(0, 3),
    activations=st.just(1.0),
    dropped=st.floats(0, 1),
    stash=st.floats(0, 0.2),
    message=st.floats(0, 2),
)


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 5), m=st.integers(4, 10), latency=st.floats(0, 1), data=st.data())
def test_uneven_stages_agree_with_the_reference(name, p, m, latency, data):
    stages = []
    schedule = SCHEDULES.get(name)(shape=PipelineShape(p, m))
    recomputed = full_recompute(schedule, (1,) * p)
    for again in recomputed:
        cost = data.draw(stage_numbers)
        stages.append(cost if again else StageCosts(cost.forward, cost.input_grad, cost.weight_grad, message=1))
    costs = Costs(tuple(stages), latency=latency, bandwidth=2)
    result = simulate(build_plan(schedule, layers_per_stage=(1,) * p, recomputed_layers=recomputed), costs)
    ends = {(t.action.stage, t.action.kind.value, t.action.microbatch): t.end for r in result.timeline for t in r}
    assert ends == pytest.approx(reference(result.plan, costs))
    assert result.step_time == max(ends.values())


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(2, 8), m=st.integers(1, 32), latency=st.sampled_from([0.0, 0.125, 1.0]))
def test_what_holds_for_every_simulation(name, p, m, latency):
    if m < SCHEDULES.get(name).min_microbatches:
        return
    result = run(name, p, m, latency=latency)
    counts = Counter(t.action for row in result.timeline for t in row)
    assert set(counts.values()) == {1}
    for rank, row in enumerate(result.timeline):
        assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
        assert result.busy[rank] == pytest.approx(math.fsum(t.end - t.start for t in row))
        assert row[-1].end <= result.step_time
        bound = SCHEDULES.get(name)(shape=PipelineShape(p, m)).max_in_flight(rank)
        assert latency or result.peak_in_flight[rank] <= bound
    assert 0 <= result.bubble_share < 1
    assert 0 <= result.recompute_share < 1
    assert run(name, p, m, latency=latency) == result


def test_an_endless_plan_is_refused():
    with pytest.raises(ScheduleError, match=r"ranks \[0, 1\] wait for ever"):
        simulate(hand_plan("0B0 0F0", "1F0 1B0", m=1), Costs((StageCosts(1, 1, 1),) * 2))


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        (Costs((StageCosts(1, 1, 1),)), "costs are of 1 stages, the plan has 2"),
        (Costs((StageCosts(1, 1, 1), StageCosts(1, -1, 1))), "finite and at least 0"),
        (Costs((StageCosts(1, 1, 1), StageCosts(1, math.nan, 1))), "finite and at least 0"),
        (Costs((StageCosts(1, 1, 1), StageCosts(math.inf, 1, 1))), "finite and at least 0"),
        (Costs((StageCosts(1, 1, 1),) * 2, latency=-1), "finite and at least 0"),
        (Costs((StageCosts(1, 1, 1),) * 2, bandwidth=0), "the bandwidth above 0"),
        (Costs((StageCosts(0, 0, 0),) * 2), "all zero"),
        (Costs((StageCosts(1, 1, 1, recompute=1),) * 2), "recompute on stage 0, where the plan keeps all"),
    ],
)
def test_wrong_costs_are_refused(costs, reason):
    with pytest.raises(ValueError, match=reason):
        simulate(hand_plan("0F0 0B0", "1F0 1B0", m=1), costs)
