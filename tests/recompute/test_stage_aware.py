"""stage_aware: a budget as recomputed layers per stage; Merak's rule is its special case, and never faster."""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ext.core.errors import ConfigError, InfeasibleError
from ext.pipeline.build import build_plan, full_recompute
from ext.pipeline.costs import Costs
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.passes import place_recomputes
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.pipeline.stage_model import StageModel, equal_layers
from ext.pipeline.timing import OrderCosts
from ext.recompute.policy import POLICIES

sys.path.insert(0, str(Path(__file__).parent))

from merak_rule import merak_first_share, merak_layers, merak_shares

POLICY = POLICIES.get("stage_aware")()
MERAK = ("last_no_recompute", "shifted_critical_path")


def _layer(layers, alpha=0.06, f=1.0, b=1.0, w=1.0, r=1.0):
    """One of ``layers`` equal layers of a stage whose times and activations are 1."""
    return LayerCosts(f / layers, b / layers, w / layers, r / layers, 1 / layers, alpha / layers)


def _models(schedule, layer, layers, fixed=None):
    """The choices of equal stages."""
    models = [
        equal_layers(layer, layers, may_recompute=schedule.may_recompute(stage))
        for stage in range(len(schedule.rank_of))
    ]
    return [replace(model, fixed=0.0 if fixed is None else fixed[stage]) for stage, model in enumerate(models)]


def _choose(name, p, m, budget, layer=None, layers=8, fixed=None):
    schedule = SCHEDULES.get(name)(shape=PipelineShape(p, m))
    budgets = budget if isinstance(budget, list) else [budget] * p
    return POLICY.choose(schedule, _models(schedule, layer or _layer(layers), layers, fixed), budgets)


def _simulated(schedule, layer, layers, counts):
    plan = build_plan(schedule, layers_per_stage=[layers] * len(counts), recomputed_layers=counts)
    return simulate(plan, Costs(stage_costs(layer, [layers] * len(counts), counts)))


def _best_of_merak(p, m, budget, layer, layers):
    """Fastest step under its rule within the budget: every share of stage 0, both of its schedules."""
    best = math.inf
    for counts in {merak_layers(step / 256, p, layers) for step in range(1, 257)}:
        costs = Costs(stage_costs(layer, [layers] * p, counts))
        for name in MERAK:
            schedule = SCHEDULES.get(name)(shape=PipelineShape(p, m))
            timing = OrderCosts(costs, schedule.rank_of, m)
            recomputing = [stage for stage in range(p) if counts[stage]]
            orders = [
                timing.codes.encode(
                    place_recomputes(schedule.order(rank), schedule.early_recomputes(rank), recomputing)
                )
                for rank in range(p)
            ]
            if max(map(timing.peak, orders)) <= budget + 1e-9:
                best = min(best, timing.step_time(orders))
    return best


@pytest.mark.parametrize(
    ("p", "m", "budget", "time"),
    [
        (4, 16, 1.25, 70.0),
        (4, 16, 1.6, 68.375),
        (4, 16, 2, 65.5),
        (4, 16, 3, 61.5),
        (8, 32, 1.5, 145.875),
        (8, 32, 3, 137.25),
    ],
)
def test_meraks_rule_in_whole_layers_and_never_slower_than_it(p, m, budget, time):
    assert _best_of_merak(p, m, budget, _layer(8), 8) == pytest.approx(time)
    assert _choose("shifted_critical_path", p, m, budget).step_time <= time + 1e-9


def test_never_slower_than_meraks_best_over_random_cases():
    rng = random.Random(5)
    compared = 0
    while compared < 200:
        p, layers = rng.randint(2, 6), rng.choice([2, 3, 4, 6, 8])
        m = rng.randint(4, 3 * p + 4)
        layer = _layer(
            layers,
            rng.choice([0, 0.03, 0.1]),
            *(rng.choice([0.5, 0.8, 1.0, 1.3, 2.0]) for _ in range(3)),
            rng.choice([0.7, 1.0]),
        )
        budget = rng.uniform(1.05, p + 0.5)
        merak = _best_of_merak(p, m, budget, layer, layers)
        if merak == math.inf:
            continue
        compared += 1
        ours = _choose("shifted_critical_path", p, m, budget, layer, layers)
        assert ours.step_time <= merak + 1e-9, (p, m, layers, layer, budget)
        again = _simulated(ours.schedule, layer, layers, ours.recomputed_layers)
        assert again.step_time == pytest.approx(ours.step_time)
        assert again.peak_activations == pytest.approx(ours.memory)
        assert max(ours.memory) <= budget + 1e-9


@pytest.mark.parametrize(("p", "budget"), [(4, 1.75), (4, 2.5), (6, 3.1), (8, 1.3), (8, 4.0)])
def test_meraks_formula_is_the_case_of_equal_stages(p, budget):
    """Where a backward brings back its whole stage and a checkpoint costs nothing, as its formula assumes."""
    layers = 240
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(p, 4 * p))
    models = [
        StageModel(tuple(replace(costs, working_set=costs.dropped) for costs in model.costs))
        for model in _models(schedule, _layer(layers, alpha=0.0), layers)
    ]
    ours = POLICY.choose(schedule, models, [budget] * p).recomputed_layers
    shares = merak_shares(merak_first_share(budget, p), p)
    assert ours == tuple(math.ceil(layers * share - 1e-6) for share in shares)


def test_two_activations_in_flight():
    """Most recompute on stage 0, none on the last; within the budget, and faster than recomputing everything."""
    choice = _choose("1f1b", 4, 16, 2.0)
    assert list(choice.recomputed_layers) == sorted(choice.recomputed_layers, reverse=True)
    assert choice.recomputed_layers[0] > choice.recomputed_layers[1] > choice.recomputed_layers[2] >= 0
    assert choice.recomputed_layers[3] == 0
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(4, 16))
    result = _simulated(schedule, _layer(8), 8, choice.recomputed_layers)
    assert max(result.peak_activations) <= 2.0 + 1e-9
    assert result.step_time <= _simulated(schedule, _layer(8), 8, full_recompute(schedule, [8] * 4)).step_time
    fewer = [*choice.recomputed_layers]
    for stage in range(3):
        if fewer[stage]:
            fewer[stage] -= 1
            assert _simulated(schedule, _layer(8), 8, fewer).peak_activations[stage] > 2.0
            fewer[stage] += 1


def test_what_the_ends_hold_counts():
    bare = _choose("1f1b", 4, 16, 2.5).recomputed_layers
    ends = _choose("1f1b", 4, 16, 2.5, fixed=[0.5, 0, 0, 1.6]).recomputed_layers
    assert ends[0] > bare[0]
    assert ends[1:3] == bare[1:3]
    assert ends[3] > bare[3]


def test_a_budget_per_stage():
    counts = _choose("1f1b", 4, 16, [4.0, 1.3, 4.0, 4.0]).recomputed_layers
    assert counts[1] > 0
    assert counts == (0, counts[1], 0, 0)


def test_an_impossible_budget_names_the_smallest_possible():
    with pytest.raises(ConfigError) as caught:
        _choose("1f1b", 4, 16, [0.4, 0.29, 9, 9])
    assert isinstance(caught.value, InfeasibleError)
    text = str(caught.value)
    assert "stage 1: needs at least 0.305, the budget is 0.29" in text
    assert "stage 0" not in text
    assert "0.365, 0.305, 0.245, 0.185" in text
    assert _choose("1f1b", 4, 16, [0.365, 0.305, 0.245, 0.185]).recomputed_layers == (8, 8, 8, 8)


def test_a_stage_that_never_recomputes_needs_its_activations():
    with pytest.raises(ConfigError, match="stage 3, which 'shifted_critical_path' never recomputes: needs at least 1"):
        _choose("shifted_critical_path", 4, 16, 0.99)


def test_extra_forwards_follow_the_budget():
    """Little memory leaves no room for extra forwards; with more, as many run as pay."""
    slow_backward = _layer(8, b=2.0, w=2.0)
    tight = _choose("shifted_critical_path", 4, 16, 1.19, slow_backward)
    loose = _choose("shifted_critical_path", 4, 16, 9.0, slow_backward)
    assert tight.step_time > loose.step_time
    assert max(tight.memory) <= 1.19


def test_equal_layers_cost_what_their_sum_costs():
    layer = _layer(5, alpha=0.1, f=1.5, b=2.0, w=0.5, r=0.7)
    for may in (True, False):
        costs = equal_layers(layer, 5, may_recompute=may).costs
        assert len(costs) == (6 if may else 1)
        for count, got in enumerate(costs):
            want = stage_costs(layer, [5], [count])[0]
            assert vars(got) == pytest.approx(vars(want))
