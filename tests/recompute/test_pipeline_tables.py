"""Tables for whole pipelines: budgets kept for every schedule, R only where waits are used, several kinds of layers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ext.cost.profile import Deferral, LayerProfile
from ext.cost.states import StateBytes
from ext.pipeline.memory_table import predict
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.stage_model import PipelineProfile, Stage
from ext.recompute.choices import stage_choices
from ext.recompute.heu import solve_heu
from ext.recompute.opt import solve_opt
from ext.recompute.pipeline_tables import choose_tables
from ext.recompute.problem import InfeasibleBudget
from ext.recompute.stage_aware import BudgetError
from ext.recompute.stage_costs import table_costs
from ext.recompute.stage_tables import StageLayers, solve_stage, working_set
from ext.recompute.table import KEEP
from ext.recompute.units import AllReduces, LayerCosts, UnitCosts
from ext.recompute.windows import wait_window

SCHEDULE_NAMES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "zb_h1")
SIZE = 1000


def layer(scale=1, first_time=1.0):
    """Five units, of which the second is only read by the third, and the first keeps more than its backward needs."""
    return LayerCosts(
        (
            UnitCosts("a", (), 300 * scale, first_time, only_read=100 * scale),
            UnitCosts("b", ("a",), 500 * scale, 2.0, needed=False),
            UnitCosts("c", ("b",), 400 * scale, 3.0),
            UnitCosts("d", ("c",), 800 * scale, 1.0, half="mlp"),
            UnitCosts("e", ("d",), 100 * scale, 1.0, half="mlp", keep=True),
        ),
        100 * scale,
        8.0,
        16.0,
    )


def whole(costs):
    """The same layer as one profile: inputs saved, and all that its units hold."""
    held = sum(unit.held for unit in costs.units)
    return LayerProfile("Block", 8.0, 8.0, 8.0, 8.0, (costs.input_bytes, held, costs.input_bytes), (0,), (2,), (0, 1))


def pipeline(num_stages, num_layers=3, waits=None):
    stages = [[replace(layer(), all_reduces=waits)] * num_layers for _ in range(num_stages)]
    profile = PipelineProfile(
        tuple(Stage([whole(c) for c in stage], is_last=s == num_stages - 1) for s, stage in enumerate(stages)),
        StateBytes(parameter=0, gradient=0, optimizer=0),
    )
    return profile, stages


def chosen(name, num_stages, share, solve=solve_heu, microbatches=8, waits=None, **options):
    """Tables within a share of what keeping everything holds."""
    profile, units = pipeline(num_stages, waits=waits)
    schedule = SCHEDULES.get(name)(shape=PipelineShape(num_stages, microbatches))
    layers = [3] * num_stages
    enough = choose_tables(schedule, profile, units, [10**9] * num_stages, solve, layers_per_stage=layers)
    assert not any(tables.num_units for tables in enough.stages)
    rows = predict(enough.plan, profile, None, enough.costs)
    budgets = [round(row.total - (1 - share[row.stage]) * row.activations) for row in rows]
    found = choose_tables(schedule, profile, units, budgets, solve, layers_per_stage=layers, **options)
    return found, predict(found.plan, profile, budgets, found.costs), budgets


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_budgets_are_kept_and_waits_used(name, num_stages):
    tight = 0.85 if name == "zb_h1" else 0.6
    share = [tight] * (num_stages - 2) + [tight if num_stages == 2 else 0.9, 1.0]
    found, rows, budgets = chosen(name, num_stages, share)
    assert found.stages[0].num_units > 0
    assert found.stages[-1].num_units == 0
    for stage, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        tables = found.stages[stage]
        assert row.total <= budget
        waiting = any(tables.recomputed("P"))
        early = {m for s, m in found.plan.early_recomputes if s == stage}
        assert bool(early) == waiting
        assert found.early[stage] == len(early) / 8
        assert found.plan.recomputed_layers[stage] == tables.num_recomputing
        assert found.reserves[stage] >= sum(unit.bytes for units in tables.recomputed("P") for unit in units)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(
    "waits", [AllReduces(1, 1, 2, 2), AllReduces(9, 9, 0, 0), AllReduces(0, 0, 9, 9), AllReduces(2, 4, 6, 1)]
)
def test_budgets_are_kept_under_all_reduces(name, waits):
    tight = 0.85 if name == "zb_h1" else 0.6
    found, rows, budgets = chosen(name, 4, [tight, tight, 0.9, 1.0], waits=waits)
    assert all(row.total <= budget for row, budget in zip(rows, budgets, strict=True))
    # Under gpipe a single backward has another micro-batch's forward before it.
    used = any(found.stages[0].recomputed("F1", "F2", "B1", "B2"))
    assert used or (name == "gpipe" and not waits.mlp_backward)
    without, _, _ = chosen(name, 4, [tight, tight, 0.9, 1.0])
    assert found.step_time <= without.step_time + 1e-9
    alone, _, _ = chosen(name, 4, [tight, tight, 0.9, 1.0], waits=waits, overlap=False)
    assert not any(alone.stages[0].recomputed("F1", "F2", "B1", "B2"))


def test_without_overlap_everything_runs_on_demand_and_takes_longer():
    overlapped, _, _ = chosen("1f1b", 2, [0.6, 1.0], microbatches=2)
    assert overlapped.plan.early_recomputes == {(0, 0), (0, 1)}
    alone, _, _ = chosen("1f1b", 2, [0.6, 1.0], microbatches=2, overlap=False)
    assert not alone.plan.early_recomputes
    assert not any(alone.stages[0].recomputed("P"))
    assert alone.step_time > overlapped.step_time


def test_opt_is_no_worse_than_heu():
    for share in (0.5, 0.6, 0.8):
        heu, _, _ = chosen("1f1b", 4, [share, share, 0.95, 1.0])
        opt, _, _ = chosen("1f1b", 4, [share, share, 0.95, 1.0], solve=lambda p: solve_opt(p, time_limit=0.5))
        assert sum(t.exposed for t in opt.stages) <= sum(t.exposed for t in heu.stages) + 1e-9


def test_the_smallest_budget_is_named_and_is_the_smallest():
    profile, units = pipeline(3)
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(3, 6))

    def choose(budgets):
        return choose_tables(schedule, profile, units, budgets, solve_heu, layers_per_stage=[3] * 3, show=str)

    with pytest.raises(BudgetError) as refused:
        choose([10] * 3)
    assert "stage 0 needs at least" in str(refused.value)
    named = str(refused.value).partition("by stage: ")[2].partition(". ")[0]
    smallest = [int(number) for number in named.split(", ")]
    choose(smallest)
    for stage in range(3):
        with pytest.raises(BudgetError, match=f"stage {stage} needs at least {smallest[stage]}"):
            choose([size - (s == stage) for s, size in enumerate(smallest)])


# -- one stage -----------------------------------------------------------------------------------------------


def test_kinds_share_a_budget_and_a_window():
    large, small = layer(10), layer(1)
    windows = (wait_window(6.0, 0.0),)
    most = 4 * (2 * large.activation_bytes + small.activation_bytes)
    stage = StageLayers((large, None, small, large), 4, int(0.7 * most), windows)
    found = solve_stage(stage, solve_heu)
    assert found.bytes <= stage.budget
    assert [len(part.positions) for part in found.parts] == [2, 1]
    assert found.tables[0] == found.tables[3]
    assert found.tables[1].decisions == ()
    used = sum(unit.time for units in found.recomputed("P") for unit in units)
    assert used <= 6.0 + 1e-9
    assert found.exposed < solve_stage(replace(stage, windows=()), solve_heu).exposed or used == 0


def test_a_stage_without_units_says_what_it_lacks():
    with pytest.raises(InfeasibleBudget) as refused:
        solve_stage(StageLayers((None, None), 4, -5), solve_heu)
    assert refused.value.smallest_budget == 0
    assert solve_stage(StageLayers((None, None), 4, 0), solve_heu).num_units == 0


def test_kinds_share_the_room_of_one_layer():
    """A backward goes through one layer at a time, whatever its kind."""
    large, small = layer(10), layer(7, first_time=2.0)
    alone = []
    for costs in (large, small):
        with pytest.raises(InfeasibleBudget) as refused:
            solve_stage(StageLayers((costs,) * 2, 4, 0), solve_heu)
        alone.append(refused.value.smallest_budget)
    both = StageLayers((large, small, large, small), 4, 0)
    with pytest.raises(InfeasibleBudget) as refused:
        solve_stage(both, solve_heu)
    smallest = refused.value.smallest_budget
    least = solve_stage(replace(both, budget=smallest), solve_heu)
    transients = [part.transient for part in least.parts]
    assert sum(alone) - smallest == min(transients) > 0
    assert least.bytes == smallest
    for budget in range(smallest, 2 * smallest, smallest // 20):
        found = solve_stage(replace(both, budget=budget), solve_heu)
        kept = 4 * (found.kept_bytes + sum(costs.input_bytes for costs in both.layers))
        assert kept + max(part.transient for part in found.parts) == found.bytes <= budget
        assert found.exposed <= least.exposed


def test_kinds_keep_every_budget():
    draw = random.Random(0)
    for _ in range(40):
        kinds = [
            LayerCosts(
                tuple(
                    UnitCosts(name, inputs, draw.randint(0, 9), draw.randint(0, 3), needed=draw.random() < 0.7)
                    for name, inputs in (("a", ()), ("b", ("a",)), ("c", ("a", "b")), ("d", ("c",)))
                ),
                draw.randint(1, 9),
            )
            for _ in range(3)
        ]
        stage = StageLayers((*kinds, kinds[0]), draw.randint(1, 3), 0)
        try:
            smallest = solve_stage(stage, solve_heu).bytes
        except InfeasibleBudget as refused:
            smallest = refused.smallest_budget
        for budget in range(smallest, smallest + 40, 4):
            found = solve_stage(replace(stage, budget=budget), solve_heu)
            kept = stage.in_flight * (found.kept_bytes + sum(costs.input_bytes for costs in stage.layers))
            assert kept + working_set(found) <= found.bytes <= budget


def test_a_budget_for_everything_keeps_everything():
    costs = layer()
    enough = 4 * 3 * costs.activation_bytes
    kept = solve_stage(StageLayers((costs,) * 3, 4, enough), solve_heu)
    assert (kept.num_units, kept.exposed, kept.bytes, kept.saved_bytes) == (0, 0.0, enough, 0)
    squeezed = solve_stage(StageLayers((costs,) * 3, 4, enough - 1), solve_heu)
    assert squeezed.num_units > 0


def test_what_only_recomputes_read_is_no_saving():
    costs = layer(first_time=100.0)
    found = solve_stage(StageLayers((costs,) * 3, 4, int(4 * 3 * costs.activation_bytes * 0.55)), solve_heu)
    table = found.tables[0]
    assert (table["a"], table["c"]) == (KEEP, "C")  # so b is recomputed from all of what a gives
    dropped = sum(unit.held for unit in costs.units if table[unit.name] != KEEP)
    assert found.read_again == 3 * 100
    assert found.saved_bytes == 3 * (dropped - 100)
    assert found.kept_bytes == 3 * sum(unit.held for unit in costs.units) - found.saved_bytes


def test_the_memory_table_counts_what_only_recomputes_read():
    profile, _ = pipeline(2)
    units = [[layer(first_time=100.0)] * 3] * 2
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(2, 8))
    budgets = [round(0.62 * 2 * 3 * layer().activation_bytes) + profile.fixed(0), 10**9]
    found = choose_tables(schedule, profile, units, budgets, solve_heu, layers_per_stage=[3, 3], overlap=False)
    tables = found.stages[0]
    assert tables.read_again > 0
    row = predict(found.plan, profile, budgets, found.costs)[0]
    whole_stage = profile.stages[0].costs(0).activations
    # The backward brings back b (500) for c (400), lets go of b, and then wants d (800).
    assert row.activations == 2 * (whole_stage - tables.saved_bytes) + 400 + 800


# -- split backwards -----------------------------------------------------------------------------------------

WAITING, GROWTH = 700, 250
"""Bytes of one layer that its W needs, and that its I holds beyond what its forward saved."""


def with_deferrals(profile, waiting=WAITING):
    layers = [[replace(layer, deferral=Deferral((), waiting, GROWTH)) for layer in s.layers] for s in profile.stages]
    last = len(layers) - 1
    return replace(profile, stages=tuple(Stage(own, is_last=i == last) for i, own in enumerate(layers)))


@pytest.mark.parametrize("waiting", [100, WAITING, 3000])
@pytest.mark.parametrize("overlap", [True, False])
def test_w_needs_the_same_whatever_is_recomputed(waiting, overlap):
    profile, units = pipeline(2)
    stage = with_deferrals(profile, waiting).stages[0]
    whole = stage.costs(0)
    for tables in stage_choices(profile, 0, units[0], 3, overlap=overlap).tables[1:]:
        costs = table_costs(stage, tables)
        assert costs.split.waiting == whole.split.waiting == 3 * waiting
        kept = costs.activations - costs.dropped + costs.stash
        # Layer by layer from the last one on: what it kept, what it brings back, what the ones behind it left.
        one_layer = kept / 3
        most = max((i + 1) * one_layer + (2 - i) * waiting + working_set(tables) + GROWTH for i in range(len(units[0])))
        # What the recomputes of a layer have read stays until the layer is done.
        table = tables.tables[0]
        names = {name for unit in units[0][0].units if table[unit.name] in ("P", "C") for name in unit.inputs}
        read = 100 + sum(unit.bytes for unit in units[0][0].units if unit.name in names and table[unit.name] == KEEP)
        everything = kept + sum(unit.bytes for back in tables.recomputed() for unit in back) + whole.split.growth + read
        found = kept + costs.split.working_set
        assert min(most + read, everything) <= found <= max(kept, 3 * waiting) + working_set(tables) + GROWTH + read
        after_r = kept + costs.dropped
        assert max(after_r, 3 * waiting) <= after_r + costs.split.growth <= everything


def test_what_is_known_of_w_saves_memory():
    profile, units = pipeline(4)
    schedule = SCHEDULES.get("zb_h1")(shape=PipelineShape(4, 8))

    def smallest(profile):
        with pytest.raises(BudgetError) as refused:
            choose_tables(schedule, profile, units, [10] * 4, solve_heu, layers_per_stage=[3] * 4, show=str)
        named = str(refused.value).partition("by stage: ")[2].partition(". ")[0]
        return [int(number) for number in named.split(", ")]

    known = with_deferrals(profile)
    least = smallest(known)
    assert all(size < more for size, more in zip(least[1:], smallest(profile)[1:], strict=True))
    for factor in (1.0, 1.1, 1.3, 1.6):
        budgets = [round(factor * size) for size in least]
        found = choose_tables(schedule, known, units, budgets, solve_heu, layers_per_stage=[3] * 4)
        assert found.stages[1].num_units > 0
        assert not any(row.exceeds for row in predict(found.plan, known, budgets, found.costs))


@pytest.mark.parametrize("waiting", [None, 900, 1700])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_every_budget_above_the_smallest_is_kept_under_a_split_backward(waiting, num_layers):
    profile, units = pipeline(3, num_layers)
    if waiting is not None:
        profile = with_deferrals(profile, waiting)
    schedule = SCHEDULES.get("zb_h1")(shape=PipelineShape(3, 6))

    def tables(budgets):
        return choose_tables(schedule, profile, units, budgets, solve_heu, layers_per_stage=[num_layers] * 3, show=str)

    enough = [row.total for row in predict(tables([10**9] * 3).plan, profile, None)]
    assert not any(stage.num_units for stage in tables(enough).stages)
    with pytest.raises(BudgetError) as refused:
        tables([10, *enough[1:]])
    smallest = int(str(refused.value).partition("by stage: ")[2].partition(",")[0])
    assert smallest < enough[0]
    for step in range(21):
        budget = smallest + (enough[0] - smallest) * step // 20
        found = tables([budget, *enough[1:]])
        assert predict(found.plan, profile, None, found.costs)[0].total <= budget
