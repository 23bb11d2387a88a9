"""The search behind `auto`: within memory, never behind the named schedules, the same for the same seed."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest

from ext.core.errors import InfeasibleError
from ext.pipeline.actions import Kind
from ext.pipeline.costs import SplitMemory, StageCosts
from ext.pipeline.layout import LayerCosts
from ext.pipeline.simulate import simulate
from ext.pipeline.stage_model import StageModel
from ext.pipeline.validate import validate
from ext.planner.search import anneal
from ext.planner.search.list_scheduler import Knobs, actions_of, list_schedule
from ext.planner.search.search import SEARCHED, Chosen, search
from ext.planner.search.space import Layout, Space, any_layers, fixed_stages
from ext.planner.search.starts import plain_knobs, starts

LONG = 60.0
"""A deadline that no test reaches; the work ends it."""


def make_space(p: int, m: int, budget: float, *, layers: int = 8, latency: float = 0.0, **times: float) -> Space:
    share = 1 / layers
    unit = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "recompute": 1.0, **times}
    layer = LayerCosts(**{key: value * share for key, value in unit.items()}, activations=share, stash=0.06 * share)
    return Space(any_layers(layer), (layers,) * p, m, (budget,) * p, latency)


def random_case(number: int) -> Space:
    """Uneven times and latency, a budget between a few layers and more than a step needs."""
    draw = random.Random(number)
    p, m = draw.randint(1, 8), draw.randint(1, 32)
    times = {key: draw.uniform(0.3, 2.0) for key in ("forward", "input_grad", "weight_grad", "recompute")}
    budget = draw.choice([draw.uniform(1.1, p + 1.0), math.inf])
    return make_space(p, m, budget, layers=draw.randint(1, 8), latency=draw.choice([0.0, 0.1, 0.5]), **times)


def short(space: Space, work: int = 20_000, **options) -> Chosen:
    """A search of so much work, whatever the machine does meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ext.planner.search.search.ACTIONS_PER_SECOND", work / LONG)
        return search(space, seconds=LONG, **options)


def check(space: Space, chosen: Chosen) -> None:
    validate(chosen.plan)
    assert sum(chosen.layout.layers) == sum(space.layers_per_stage)
    assert chosen.plan.layers_per_stage == chosen.layout.layers
    simulation = simulate(chosen.plan, space.costs(chosen.layout))
    assert simulation.step_time == pytest.approx(chosen.step_time)
    for peak, budget in zip(simulation.peak_activations, space.budgets, strict=True):
        assert peak <= budget * (1 + 1e-6)


@pytest.mark.parametrize("number", range(12))
def test_never_slower_than_the_best_preset_and_within_memory(number):
    space = random_case(number)
    try:
        chosen = short(space, tolerance=0.0)
    except InfeasibleError:
        return
    check(space, chosen)
    assert chosen.step_time <= min(chosen.presets.values(), default=math.inf) * (1 + 1e-9)


@pytest.mark.parametrize("budget", [1.5, math.inf])
def test_backwards_stay_whole_where_they_cannot_be_split(budget):
    space = replace(make_space(4, 8, budget), splits_backward=False)
    chosen = short(space, tolerance=0.0)
    check(space, chosen)
    assert not chosen.plan.split_backwards
    assert "zb_h1" not in chosen.presets
    assert short(replace(space, splits_backward=True), tolerance=0.0).step_time <= chosen.step_time


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_never_slower_than_the_best_preset_in_200_cases():
    searched = 0
    for number in range(200):
        space = random_case(number)
        try:
            chosen = search(space, seconds=1.0, tolerance=0.0)
        except InfeasibleError:
            continue
        check(space, chosen)
        assert chosen.step_time <= min(chosen.presets.values(), default=math.inf) * (1 + 1e-9)
        searched += chosen.source == SEARCHED
    assert searched > 60


@pytest.mark.parametrize(
    ("budget", "within"), [(1.25, 65.5), (1.6, 63.6), (2.0, 61.8), (3.0, 58.0)], ids=["1.25A", "1.6A", "2A", "3A"]
)
def test_four_ranks_beat_what_graded_recompute_alone_can_do(budget, within):
    """With 32 layers and 16 micro-batches; Merak's rule in whole layers takes 70, 68.4, 65.5 and 61.5."""
    space = make_space(4, 16, budget)
    chosen = short(space, 700_000, tolerance=0.0)
    check(space, chosen)
    assert chosen.step_time <= within
    assert chosen.source == SEARCHED


def test_the_same_seed_finds_the_same_and_another_may_not():
    plans = [short(make_space(4, 8, 1.5), tolerance=0.0, seed=seed).plan for seed in (3, 3, 4)]
    assert plans[0].to_text() == plans[1].to_text()
    assert plans[0].hash != plans[2].hash


def test_plain_1f1b_is_kept_within_the_tolerance_and_both_times_are_told():
    space = make_space(2, 30, math.inf)
    best = short(space, tolerance=0.0)
    plain = best.presets["1f1b"]
    assert best.step_time < plain < best.step_time * 1.05
    assert best.source != "1f1b"
    kept = short(space, tolerance=0.05)
    assert (kept.source, kept.step_time, kept.best_time) == ("1f1b", plain, best.step_time)
    assert kept.keeps_plain
    assert f"{plain:.6g}" in kept.reason
    assert f"{best.step_time:.6g}" in kept.reason
    assert {action.kind for order in kept.plan.orders for action in order if action.kind.is_compute} == {Kind.F, Kind.B}


def test_ctrl_c_gives_the_best_so_far():
    calls = []

    def interrupt(share: float, best: float) -> None:
        calls.append(best)
        if len(calls) == 3:
            raise KeyboardInterrupt

    space = make_space(4, 8, 1.5)
    chosen = search(space, seconds=LONG, tolerance=0.0, on_progress=interrupt)
    assert chosen.stopped_by == "interrupt"
    assert chosen.step_time <= calls[-1]
    check(space, chosen)


def test_the_clock_ends_a_search_that_is_too_slow():
    space = make_space(4, 16, 1.5)
    started = time.monotonic()
    chosen = search(space, seconds=0.05, tolerance=0.0)
    assert chosen.stopped_by in ("clock", "work")
    assert time.monotonic() - started < LONG / 4
    check(space, chosen)


def test_a_budget_that_nothing_keeps_is_refused():
    with pytest.raises(InfeasibleError, match="memory budget"):
        search(make_space(4, 8, 0.1), seconds=0.1)


def test_what_is_fixed_stays():
    base = make_space(4, 8, 4.5)
    placed = Space(base.models, (9, 8, 8, 7), 8, base.budgets, moves_layers=False)
    assert short(placed, tolerance=0.0).layout.layers == (9, 8, 8, 7)
    for recompute in ("none", "all"):
        space = Space(base.models, base.layers_per_stage, 8, base.budgets, recompute=recompute)
        layout = short(space, tolerance=0.0).layout
        allowed = ((0,) * 4,) if recompute == "none" else (layout.layers, (8, 8, 8, 0))
        assert layout.recomputed in allowed
    # Schedules that keep their last stage by definition count as ones that recompute everything.
    everything = Space(base.models, base.layers_per_stage, 8, base.budgets, recompute="all")
    assert "shifted_critical_path" in short(everything, 0, tolerance=0.0).presets
    listed = Space(base.models, (8,) * 4, 8, base.budgets, moves_layers=False, recompute=(2, 0, 1, 0))
    assert short(listed, tolerance=0.0).layout == Layout((8,) * 4, (2, 0, 1, 0))


def test_stages_of_their_own_costs_budgets_and_fixed_memory():
    """A first stage with an embedding that cannot be recomputed, a heavy last one, and a tight budget there."""

    def stage(scale: float, most: int, fixed: float) -> StageModel:
        whole = StageCosts(forward=scale, input_grad=scale, weight_grad=scale, activations=scale, message=0.1)
        part = scale / 4
        costs = [
            StageCosts(
                scale, scale, scale, k * part, activations=scale, dropped=k * part, stash=0.01 * k, working_set=part
            )
            for k in range(1, most + 1)
        ]
        return StageModel((whole, *costs), fixed)

    stages = [stage(1.0, 2, 3.0), stage(1.0, 4, 0.0), stage(1.4, 4, 5.0)]
    space = Space(fixed_stages(stages), (4, 4, 4), 9, (5.0, 2.5, 6.9), latency=0.05, bandwidth=10.0, moves_layers=False)
    chosen = short(space, tolerance=0.0)
    simulation = simulate(chosen.plan, space.costs(chosen.layout))
    for peak, budget, model in zip(simulation.peak_activations, space.budgets, stages, strict=True):
        assert peak + model.fixed <= budget * (1 + 1e-6)
    assert chosen.layout.recomputed[0] <= 2
    assert chosen.step_time <= min(chosen.presets.values(), default=math.inf) * (1 + 1e-9)


def test_the_list_scheduler_times_as_the_simulator_does():
    draw = random.Random(1)
    for number in range(40):
        space = random_case(number)
        for layout, knobs in starts(space, ()):
            stages = space.stages(layout)
            if stages is None:
                continue
            p = space.num_ranks
            bent = Knobs(
                tuple(draw.randint(1, space.num_microbatches) for _ in range(p)),
                tuple(draw.randint(0, 4) for _ in range(p)),
                tuple(draw.randint(0, 3) for _ in range(p)),
                tuple(draw.random() < 0.5 for _ in range(p)),
            )
            for used in (knobs, bent):
                _check_listed(space, layout, stages, used)


def test_orders_keep_the_budget_where_w_needs_less_or_more_than_the_forward_keeps():
    draw = random.Random(2)
    for number in range(60):
        base = random_case(number)
        factor = draw.choice((0.4, 0.8, 1.3))

        def split(costs: StageCosts, factor: float = factor) -> StageCosts:
            waiting, kept = factor * costs.activations, costs.activations - costs.dropped + costs.stash
            inside = max(costs.working_set, waiting - kept)
            return replace(costs, split=SplitMemory(waiting, 0.35 * costs.activations, inside))

        def known(*key: int, base: Space = base) -> StageModel:
            model = base.models(*key)
            return StageModel(tuple(map(split, model.costs)), model.fixed)

        space = replace(base, models=known, _stages={})
        for layout, knobs in starts(space, ()):
            stages = space.stages(layout)
            if stages is not None:
                _check_listed(space, layout, stages, knobs._replace(deferred=(3,) * space.num_ranks))


def _check_listed(space: Space, layout: Layout, stages, knobs: Knobs) -> None:
    listed = list_schedule(stages, space.num_microbatches, knobs)
    if listed.orders is None:
        return
    plan = chosen_plan(space, layout, listed.orders)
    simulation = simulate(plan, space.costs(layout))
    assert simulation.step_time == pytest.approx(listed.step_time)
    for peak, budget in zip(simulation.peak_activations, space.budgets, strict=True):
        assert peak <= budget * (1 + 1e-6)
    # A limit just above lets it pass, one just below does not: bounds from below never cut a good one.
    assert list_schedule(stages, space.num_microbatches, knobs, listed.step_time * (1 + 1e-6)).orders is not None
    assert list_schedule(stages, space.num_microbatches, knobs, listed.step_time * 0.5).orders is None


def chosen_plan(space: Space, layout: Layout, orders):
    from ext.pipeline.build import plan_of_orders

    return plan_of_orders(
        "auto",
        actions_of(orders),
        rank_of=range(space.num_ranks),
        num_microbatches=space.num_microbatches,
        layers_per_stage=layout.layers,
        recomputed_layers=layout.recomputed,
    )


def test_a_search_without_any_work_still_answers(monkeypatch):
    monkeypatch.setattr(anneal, "PHASES", ())
    chosen = search(make_space(3, 5, 1.5), seconds=0.1, tolerance=0.0)
    assert chosen.step_time < math.inf
    assert plain_knobs(make_space(2, 4, 1.0)).deferred == (1, 1)


def test_where_ranks_share_devices_work_counts_as_well_as_order():
    alone = Space(any_layers(LayerCosts(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)), (4,) * 4, 16, (6.0,) * 4)
    shared = replace(alone, num_devices=2.0)
    apart, together = (search(space, seconds=0.3, tolerance=0.0) for space in (alone, shared))
    assert shared.work_time(Layout((4,) * 4, (1, 2, 0, 0))) == 16 * (4 * 4 * 3 + 3) / 2
    assert together.best_time == together.step_time >= shared.work_time(together.layout)
    assert sum(together.layout.recomputed) < sum(apart.layout.recomputed)
    assert shared.work_time(apart.layout) > together.step_time > apart.step_time
