"""OPT against enumeration of every mixture of tables on small stages."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ext.cost.hardware import DEVICES, Link
from ext.cost.transformer import MODELS
from ext.recompute import columns
from ext.recompute.analytic import tensor_parallel_windows, transformer_costs
from ext.recompute.heu import solve_heu
from ext.recompute.opt import solve_opt, solve_whole_program
from ext.recompute.problem import InfeasibleBudget, StageProblem, evaluate
from ext.recompute.table import UnitTable
from ext.recompute.units import ATTENTION, MLP, LayerCosts, UnitCosts
from ext.recompute.windows import backward_windows, forward_windows, one_f_one_b_waits, wait_window


@st.composite
def stages(draw):
    """Two or three layers of up to three units, with pooled windows and one that the last layer lacks."""
    units = []
    for i in range(draw(st.integers(1, 3))):
        inputs = (f"u{i - 1}",) if i and draw(st.booleans()) else ()
        half = draw(st.sampled_from([ATTENTION, MLP]))
        needed = draw(st.sampled_from([True, True, False]))
        size, time = draw(st.integers(1, 5)), float(draw(st.integers(0, 4)))
        units.append(UnitCosts(f"u{i}", inputs, size, time, needed, half))
    capacity = st.integers(0, 5).map(float)
    offered = [
        forward_windows(draw(capacity), 0.0)[0],
        backward_windows(0.0, draw(capacity))[1],
        wait_window(draw(capacity), 0.25),
    ]
    windows = draw(st.lists(st.sampled_from(offered), unique=True, max_size=2))
    layers, in_flight = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    return StageProblem(LayerCosts(tuple(units), 1), layers, in_flight, draw(st.integers(0, 60)), tuple(windows))


def in_order(problem, table):
    chosen = problem.choice(table)
    return all(
        chosen[problem.index[name]].serves(option)
        for unit, option in zip(problem.layer.units, chosen, strict=True)
        if option.recomputes
        for name in unit.inputs
    )


@given(stages())
@settings(max_examples=30, deadline=None)
def test_opt_is_the_best_of_all_mixtures(problem):
    best = best_by_enumeration(problem)
    if best == float("inf"):
        with pytest.raises(InfeasibleBudget):
            solve_opt(problem)
        return
    solution = solve_opt(problem, time_limit=10.0)
    assert solution.exposed == pytest.approx(best, rel=0.01, abs=1e-5)
    assert solution.bound <= best + 1e-5
    assert evaluate(problem, solution.tables) == (pytest.approx(solution.exposed), solution.bytes)
    assert solution.bytes <= problem.budget
    assert solution.exposed <= solve_heu(problem).exposed + 1e-9
    assert all(in_order(problem, table) for table in solution.tables)


def best_by_enumeration(problem):
    """The least exposed time over all tables of all layers where no window is given more than it holds."""
    names = [unit.name for unit in problem.layer.units]
    tables = {
        UnitTable.of({name: o.decision for name, o in zip(names, c, strict=True)}): c
        for c in itertools.product(*problem.options)
    }
    tables = {table: c for table, c in tables.items() if in_order(problem, table)}
    best = float("inf")
    for inner in itertools.combinations_with_replacement(tables, problem.num_layers - 1):
        for last in tables:
            mixture = (*inner, last)
            if fits(problem, [tables[table] for table in mixture]):
                exposed, size = evaluate(problem, mixture)
                if size <= problem.budget:
                    best = min(best, exposed)
    return best


def fits(problem, choices):
    for window in problem.windows:
        times = [sum(o.time for o in chosen if o.decision == window.name) for chosen in choices]
        if window.stage_wide:
            if sum(times) > window.capacity * len(choices) + 1e-9:
                return False
        else:
            present = times if window.last_layer else times[:-1]
            if any(time > window.capacity + 1e-9 for time in present):
                return False
    return True


def gpt(bandwidth, share, flash, stage=0):
    shape, device = MODELS["gpt-13b"], DEVICES["a100-80gb"]
    link = Link(bandwidth=bandwidth, latency=5e-6)
    costs = transformer_costs(shape, micro_batch=4, device=device, tensor_parallel=8, link=link, flash=flash)
    windows = tensor_parallel_windows(shape, micro_batch=4, device=device, tensor_parallel=8, link=link)
    windows += one_f_one_b_waits(stage, 4, 16, costs.forward)
    in_flight = 4 - stage
    return StageProblem(costs, 10, in_flight, int(costs.activation_bytes * 10 * in_flight * share), windows)


def test_opt_mixes_tables_where_one_for_all_is_too_coarse():
    problem = gpt(230e9, 0.35, flash=True)
    heu, opt = solve_heu(problem), solve_opt(problem, time_limit=60.0, relative_gap=0.04)
    assert opt.exposed < 0.9 * heu.exposed
    assert len(set(opt.tables)) > 1
    assert opt.bytes <= problem.budget
    assert 0 < opt.bound <= opt.exposed


def test_opt_proves_nothing_exposed_at_once_on_a_slow_link():
    solution = solve_opt(gpt(14e9, 0.5, flash=True), time_limit=60.0)
    assert solution.exposed == pytest.approx(0.0, abs=1e-9)
    assert solution.gap == 0


def test_the_whole_program_finds_solutions_too():
    problem = replace(gpt(230e9, 0.5, flash=True), num_layers=3)
    problem = replace(problem, budget=int(0.5 * problem.layer.activation_bytes * 12))
    tables, bound = solve_whole_program(problem, 60.0, 0.2)
    assert tables is not None
    exposed, size = evaluate(problem, tables)
    assert size <= problem.budget * (1 + 2e-6)
    assert bound <= exposed


def test_the_bound_is_tight_and_does_not_depend_on_the_start(monkeypatch):
    problem = gpt(100e9, 0.35, flash=True, stage=1)
    found = []
    for seeds in (25, 2):
        monkeypatch.setattr(columns, "_NUM_SEEDS", seeds)
        search = columns.ColumnSearch(problem, time.perf_counter() + 60.0, 0.005)
        search.run()
        assert search.best is not None
        assert evaluate(problem, search.best)[0] == pytest.approx(search.cost)
        assert search.bound <= search.cost
        found.append((search.cost, search.bound))
    assert found[0][0] <= solve_heu(problem).exposed * (1 + 1e-9)
    (cost, bound), (other_cost, other_bound) = found
    # Where every mixture of whole layers is worse than one of parts of layers, a gap remains.
    assert bound >= 0.97 * cost
    assert other_cost == pytest.approx(cost, rel=0.02)
    assert max(bound, other_bound) <= min(cost, other_cost) * (1 + 1e-6)


def test_layers_share_the_capacity_of_a_stage_wide_window():
    # One layer's recompute takes three layers' share of the window; memory has room for one such layer.
    layer = LayerCosts((UnitCosts("a", (), 4, 3.0),), 0)
    problem = StageProblem(layer, num_layers=3, in_flight=3, budget=8, windows=forward_windows(1.0, 0.0))
    search = columns.ColumnSearch(problem, time.perf_counter() + 20.0, 0.005)
    search.run()
    assert search.cost == pytest.approx(6.0)
    assert search.best is not None
    assert sorted(table["a"] for table in search.best) == ["C", "C", "F1"]
