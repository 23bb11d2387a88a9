"""`auto` with units: within memory, never behind whole layers or the named schedules with units."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache

import pytest

from ext.core.errors import ConfigError
from ext.cost.profile import LayerProfile
from ext.cost.states import StateBytes
from ext.pipeline.costs import Costs
from ext.pipeline.memory_table import predict
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.pipeline.stage_model import PipelineProfile, Stage
from ext.pipeline.validate import validate
from ext.planner.search.search import search
from ext.planner.search.space import Space, fixed_stages
from ext.planner.search.units import UnitProblem, search_units
from ext.recompute.choices import stage_choices
from ext.recompute.heu import solve_heu
from ext.recompute.opt import solve_opt
from ext.recompute.pipeline_tables import choose_tables
from ext.recompute.stage_aware import BudgetError
from ext.recompute.tables_file import read_tables, tables_json
from ext.recompute.units import AllReduces, LayerCosts, UnitCosts

WORK = 0.02
"""Seconds, as work, of each search; the clock ends none of them."""
LIMIT = 60.0


@pytest.fixture(autouse=True)
def bounded_by_work(monkeypatch):
    monkeypatch.setattr("ext.planner.search.search.ACTIONS_PER_SECOND", 600_000 * WORK / LIMIT)


def layer(draw: random.Random, waits: AllReduces | None = None) -> LayerCosts:
    """Six units; two of them are cheap to recompute for their size, one only serves others."""
    sizes, times = ([draw.randint(1, 9) for _ in range(6)] for _ in range(2))
    units = (
        UnitCosts("norm", (), 200 * sizes[0], 0.1 * times[0]),
        UnitCosts("qkv", ("norm",), 300 * sizes[1], 1.0 * times[1]),
        UnitCosts("mix", ("qkv",), 300 * sizes[2], 1.0 * times[2], needed=False),
        UnitCosts("sum", ("mix",), 200 * sizes[3], 0.2 * times[3]),
        UnitCosts("wide", ("sum",), 900 * sizes[4], 1.0 * times[4], half="mlp"),
        UnitCosts("act", ("wide",), 900 * sizes[5], 0.1 * times[5], half="mlp", communication=draw.random() < 0.2),
    )
    time = sum(unit.time for unit in units)
    return LayerCosts(units, 200, time, 2 * time, waits)


def profile_of(costs: LayerCosts) -> LayerProfile:
    held = sum(unit.held for unit in costs.units)
    times = (costs.forward,) * 4
    return LayerProfile("Block", *times, (costs.input_bytes, held, costs.input_bytes), (0,), (2,), (0, 1))


def problem_of(number: int, **options) -> tuple[Space, UnitProblem]:
    draw = random.Random(number)
    p, m, layers = draw.randint(1, 4), draw.randint(2, 9), draw.randint(1, 3)
    waits = AllReduces(*(draw.uniform(0, 2) for _ in range(4))) if draw.random() < 0.3 else None
    kinds = [layer(draw, waits) for _ in range(2)]
    units = [[kinds[draw.random() < 0.3] for _ in range(layers)] for _ in range(p)]
    stages = tuple(Stage([profile_of(c) for c in own], is_last=s == p - 1) for s, own in enumerate(units))
    profile = PipelineProfile(stages, StateBytes(parameter=0, gradient=0, optimizer=0))
    share = draw.uniform(0.7, p + 0.5)
    budgets = tuple(round(profile.fixed(s) + share * stage.costs(0).activations) for s, stage in enumerate(stages))
    schedule = SCHEDULES.get("auto")(shape=PipelineShape(p, m))
    space = Space(
        models=fixed_stages(profile.models(lambda stage: True)),
        layers_per_stage=(layers,) * p,
        num_microbatches=m,
        budgets=tuple(map(float, budgets)),
        moves_layers=False,
    )
    return space, UnitProblem(schedule, profile, units, budgets, **{"solve": solve_heu, **options})


def presets(space: Space, problem: UnitProblem) -> dict[str, float]:
    """Step times of unit policies under the named schedules that keep the budgets."""
    found = {}
    for name in SCHEDULES:
        cls = SCHEDULES.get(name)
        if not cls.has_rule or cls.min_microbatches > space.num_microbatches:
            continue
        shape = PipelineShape(space.num_ranks, space.num_microbatches)
        asked = problem.profile, problem.units, problem.budgets, problem.solve
        layers = {"layers_per_stage": space.layers_per_stage, "overlap": problem.overlap}
        try:
            tables = choose_tables(cls(shape=shape), *asked, **layers)
        except BudgetError:
            continue
        if not any(row.exceeds for row in predict(tables.plan, problem.profile, problem.budgets, tables.costs)):
            found[name] = tables.step_time
    return found


def check(space: Space, problem: UnitProblem, **options) -> tuple[object, object] | None:
    """What was found, after all that must hold; None where nothing fits."""
    run = {"seconds": LIMIT, "seed": 1, **options}
    try:
        whole = search(replace(space, recomputes_early=problem.overlap, _stages={}), **run).step_time
    except BudgetError:
        whole = float("inf")
    named = presets(space, problem)
    try:
        chosen, tables = search_units(space, problem, **run)
    except BudgetError:
        assert whole == float("inf")
        assert not named
        return None
    validate(chosen.plan)
    if run["tolerance"] == 0:
        assert chosen.step_time <= whole * (1 + 1e-9)
        assert all(chosen.step_time <= time * (1 + 1e-9) for time in named.values())
    rows = predict(chosen.plan, problem.profile, problem.budgets, None if tables is None else tables.costs)
    assert not any(row.exceeds for row in rows)
    assert simulate(chosen.plan, chosen.costs).step_time == pytest.approx(chosen.step_time)
    assert chosen.costs == (chosen.costs if tables is None else Costs(tables.costs))
    assert bool(chosen.plan.unit_tables) == (tables is not None)
    return chosen, tables


@pytest.mark.parametrize("overlap", [True, False])
def test_never_slower_and_within_memory(overlap):
    found = [check(*problem_of(number, overlap=overlap), tolerance=0.0) for number in range(7)]
    with_units = [chosen for chosen, tables in filter(None, found) if tables is not None]
    assert len(with_units) >= 3
    assert any(chosen.step_time < chosen.whole_layers * 0.99 for chosen in with_units)
    early = [chosen for chosen, _ in filter(None, found) if chosen.plan.early_recomputes]
    assert bool(early) == overlap


@pytest.mark.slow
def test_never_slower_in_many_cases():
    for number in range(100, 125):
        check(*problem_of(number), tolerance=0.0)
    for number in range(200, 203):
        check(*problem_of(number, solve=lambda problem: solve_opt(problem, time_limit=0.2)), tolerance=0.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_whole_layers_are_taken_where_units_must_stay(overlap):
    """A unit that is never recomputed alone takes most of the layer."""
    units = (UnitCosts("norm", (), 100, 3.0), UnitCosts("routed", ("norm",), 900, 1.0, keep=True))
    kept = [[LayerCosts(units, 50, 4.0, 8.0)] * 3 for _ in range(3)]
    stages = tuple(Stage([profile_of(c) for c in own], is_last=s == 2) for s, own in enumerate(kept))
    profile = PipelineProfile(stages, StateBytes(parameter=0, gradient=0, optimizer=0))
    budgets = tuple(round(profile.fixed(s) + 1.2 * stage.costs(0).activations) for s, stage in enumerate(stages))
    schedule = SCHEDULES.get("auto")(shape=PipelineShape(3, 6))
    models = fixed_stages(profile.models(lambda stage: True))
    space = Space(models, (3, 3, 3), 6, tuple(map(float, budgets)), moves_layers=False)
    problem = UnitProblem(schedule, profile, kept, budgets, solve_heu, overlap)
    chosen, tables = check(space, problem, tolerance=0.0)
    assert tables is None
    assert sum(chosen.plan.recomputed_layers) > 0
    assert bool(chosen.plan.early_recomputes) == overlap


def test_plain_is_kept_within_the_tolerance():
    space, problem = problem_of(3)
    chosen, _ = check(space, problem, tolerance=0.0)
    kept, _ = check(space, problem, tolerance=9.0)
    assert kept.source == "1f1b"
    assert kept.step_time == kept.presets["1f1b"] >= chosen.step_time
    assert kept.best_time == pytest.approx(chosen.step_time)
    assert "whole layers take" in kept.reason


def test_the_same_is_found_again():
    space, problem = problem_of(5)
    first, again = (search_units(space, problem, seconds=LIMIT, seed=3, tolerance=0.0)[0] for _ in range(2))
    assert first.plan == again.plan


def test_choices_keep_less_and_less_and_leave_what_they_can_to_r():
    _, problem = problem_of(9)
    waits = AllReduces(1, 1, 2, 2)
    for kinds in (problem.units[0], [replace(costs, all_reduces=waits) for costs in problem.units[0]]):
        choices = stage_choices(problem.profile, 0, kinds, 3)
        kept = [costs.activations - costs.dropped + costs.stash for costs in choices.model.costs]
        assert kept == sorted(kept, reverse=True)
        assert len(set(kept)) == len(kept) > 3
        assert (choices.tables[0].num_units, choices.model.costs[0].dropped) == (0, 0)
        assert not any(any(tables.recomputed("F1", "F2")) for tables in choices.tables)
        late = [unit for tables in choices.tables for units in tables.recomputed("C") for unit in units]
        assert all(unit.communication or kinds[0].all_reduces for unit in late)
        assert any(any(tables.recomputed("P")) for tables in choices.tables)
    shared = [
        replace(
            costs,
            units=tuple(replace(unit, communication=unit.name == "act") for unit in costs.units),
            all_reduces=None,
        )
        for costs in problem.units[0]
    ]
    late = [
        unit for t in stage_choices(problem.profile, 0, shared, 3).tables for own in t.recomputed("C") for unit in own
    ]
    assert {unit.name for unit in late} == {"act"}
    alone = stage_choices(problem.profile, 0, problem.units[0], 3, overlap=False)
    assert not any(any(tables.recomputed("P")) for tables in alone.tables)
    (only,) = stage_choices(problem.profile, 0, [None] * len(problem.units[0]), 3).tables
    assert only.num_units == 0


@cache
def _with_tables():
    for number in range(20):
        space, problem = problem_of(number)
        try:
            chosen, tables = search_units(space, problem, seconds=LIMIT, seed=1, tolerance=0.0)
        except BudgetError:
            continue
        if tables is not None and any(stage.num_units for stage in tables.stages):
            return problem, chosen, tables
    raise AssertionError("no case has tables")


def test_a_file_brings_the_tables_back_and_says_what_is_wrong_with_it():
    problem, chosen, tables = _with_tables()
    content = json.loads(json.dumps({"units": tables_json(tables)}))
    stages_of = problem.profile.stages
    again = read_tables(content, chosen.plan, tables.schedule, stages_of)
    assert again == replace(tables, step_time=0.0)
    assert read_tables(content, chosen.plan, tables.schedule, None).stages == tables.stages
    first = chosen.plan.unit_tables[0][0]
    for changed, text in (
        ((("nrom", "P"), *first), "unit_tables: stage 0, layer 0: unknown unit 'nrom'. Did you mean 'norm'?"),
        ((("norm", "Q"), *first[1:]), "unit_tables: stage 0, layer 0: 'norm' is to be 'Q'. Allowed: keep, unused, F1"),
    ):
        stages = ((changed, *chosen.plan.unit_tables[0][1:]), *chosen.plan.unit_tables[1:])
        with pytest.raises(ConfigError) as error:
            read_tables(content, replace(chosen.plan, unit_tables=stages), tables.schedule, stages_of)
        assert str(error.value).startswith(text)


@pytest.mark.parametrize("damage", ["units", "reserve_bytes", "stages", "layers", "costs", "position", "number"])
def test_damaged_costs_are_one_error(damage):
    _, chosen, tables = _with_tables()
    content = json.loads(json.dumps({"units": tables_json(tables)}))
    part = content["units"]["stages"][0][0]
    if damage == "units":
        del content["units"]
    elif damage in ("reserve_bytes", "stages"):
        content["units"][damage] = content["units"][damage][1:]
    elif damage == "position":
        part["layers"][0] = 99
    elif damage == "number":
        part["budget_bytes"] = "much"
    else:
        del part[damage]
    with pytest.raises(ConfigError, match="units: no costs can be read for the unit tables"):
        read_tables(content, chosen.plan, tables.schedule, None)
