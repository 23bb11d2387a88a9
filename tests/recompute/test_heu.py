"""HEU against enumeration of every choice on small instances, and against its own integer program on large ones."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ext.core.errors import ConfigError, InfeasibleError
from ext.cost.hardware import DEVICES, Link
from ext.cost.transformer import MODELS
from ext.recompute.analytic import tensor_parallel_windows, transformer_costs
from ext.recompute.greedy import greedy
from ext.recompute.heu import heu_program, smallest_budget, solve_heu, solve_program
from ext.recompute.problem import InfeasibleBudget, StageProblem, evaluate, layer_cost, violations
from ext.recompute.reduce import reduced_options
from ext.recompute.scan import scan
from ext.recompute.table import UnitTable
from ext.recompute.units import ATTENTION, MLP, LayerCosts, UnitCosts
from ext.recompute.windows import ON_DEMAND, backward_windows, forward_windows, one_f_one_b_waits, wait_window


@st.composite
def problems(draw, tied=False):
    """Small stages with whole numbers for times and bytes, so that ties and full windows are frequent."""
    units = []
    for i in range(draw(st.integers(1, 5))):
        known = [unit.name for unit in units]
        inputs = draw(st.lists(st.sampled_from(known), unique=True, max_size=2)) if known else []
        units.append(
            UnitCosts(
                f"u{i}",
                tuple(inputs),
                bytes=draw(st.integers(0, 5)),
                time=float(draw(st.integers(0, 4))),
                needed=draw(st.booleans()),
                half=draw(st.sampled_from([ATTENTION, MLP])),
                keep=draw(st.sampled_from([False, False, False, True])),
                communication=draw(st.sampled_from([False, False, False, True])),
                view_of=draw(st.sampled_from(["", inputs[0]])) if tied and inputs else "",
                region=draw(st.sampled_from(["", "r"])) if tied else "",
            )
        )
    capacity = st.integers(0, 6).map(float)
    offered = [
        *forward_windows(draw(capacity), draw(capacity)),
        *backward_windows(draw(capacity), draw(capacity)),
        wait_window(draw(capacity), draw(st.sampled_from([0.0, 0.25]))),
    ]
    windows = draw(st.lists(st.sampled_from(offered), unique=True, max_size=3))
    windows = [replace(w, slowdown=draw(st.sampled_from([1.0, 2.0]))) for w in windows]
    return StageProblem(
        LayerCosts(tuple(units), draw(st.integers(0, 3))),
        num_layers=draw(st.integers(1, 3)),
        in_flight=draw(st.integers(1, 3)),
        budget=draw(st.integers(0, 120)),
        windows=tuple(windows),
    )


def enumerate_all(problem):
    """The least exposed time over all tables, and the least memory; the obvious way."""
    best, least = None, None
    for chosen in itertools.product(*problem.options):
        names = [unit.name for unit in problem.layer.units]
        table = UnitTable.of({name: option.decision for name, option in zip(names, chosen, strict=True)})
        total = problem.input_bytes + sum(option.bytes_for(problem.num_layers) for option in chosen)
        wrong = [text for text in violations(problem, table) if "budget" not in text]
        if wrong:
            continue
        least = total if least is None else min(least, total)
        if total <= problem.budget:
            cost = problem.num_layers * layer_cost(chosen)
            best = cost if best is None else min(best, cost)
    return best, least


def check(problem):
    best, least = enumerate_all(problem)
    if best is None:
        with pytest.raises(InfeasibleBudget) as error:
            solve_heu(problem, relative_gap=0.0)
        assert error.value.smallest_budget == least
        assert solve_heu(replace(problem, budget=least)).bytes <= least
        return
    solution = solve_heu(problem, relative_gap=0.0)
    assert violations(problem, solution.tables[0]) == []
    assert solution.exposed == pytest.approx(best, abs=1e-5)
    assert solution.bound <= best + 1e-5
    assert not solution.fell_back


@given(problems())
@settings(max_examples=120, deadline=None)
def test_the_scan_finds_what_enumeration_finds(problem):
    check(problem)


@given(problems(tied=True))
@settings(max_examples=60, deadline=None)
def test_views_and_regions_are_decided_together(problem):
    check(problem)


@given(problems(tied=True))
@settings(max_examples=60, deadline=None)
def test_the_integer_program_finds_what_enumeration_finds(problem):
    best, _ = enumerate_all(problem)
    chosen, bound, complete = solve_program(problem, problem.options, 10.0)
    assert complete
    assert (chosen is None) == (best is None)
    if chosen is not None:
        assert problem.num_layers * layer_cost(chosen) == pytest.approx(best, abs=1e-4)
        assert problem.num_layers * bound <= best + 1e-4


@given(problems(tied=True))
@settings(max_examples=60, deadline=None)
def test_the_greedy_choice_is_a_solution(problem):
    best, _ = enumerate_all(problem)
    chosen = greedy(problem, problem.options)
    if chosen is not None:
        names = [unit.name for unit in problem.layer.units]
        table = UnitTable.of({name: option.decision for name, option in zip(names, chosen, strict=True)})
        assert violations(problem, table) == []
        assert problem.num_layers * layer_cost(chosen) >= best - 1e-9


@given(problems())
@settings(max_examples=60, deadline=None)
def test_more_memory_never_costs_more(problem):
    costs = []
    for budget in range(0, 121, 15):
        try:
            costs.append(solve_heu(replace(problem, budget=budget), relative_gap=0.0).exposed)
        except InfeasibleBudget:
            assert not costs
    assert costs == sorted(costs, reverse=True)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_evaluation_agrees_with_the_model(problem):
    try:
        solution = solve_heu(problem)
    except InfeasibleBudget:
        return
    exposed, size = evaluate(problem, solution.tables)
    chosen = problem.choice(solution.tables[0])
    assert exposed == pytest.approx(problem.num_layers * layer_cost(chosen), abs=1e-9)
    assert size == problem.input_bytes + sum(option.bytes_for(problem.num_layers) for option in chosen)
    assert size <= problem.budget


def gpt(name="gpt-13b", bandwidth=230e9, flash=False, stage=0, share=0.4, waits=True):
    shape, device = MODELS[name], DEVICES["a100-80gb"]
    link = Link(bandwidth=bandwidth, latency=5e-6)
    costs = transformer_costs(shape, micro_batch=4, device=device, tensor_parallel=8, link=link, flash=flash)
    windows = tensor_parallel_windows(shape, micro_batch=4, device=device, tensor_parallel=8, link=link)
    if waits:
        windows += one_f_one_b_waits(stage, 4, 16, costs.forward)
    layers, in_flight = shape.num_layers // 4, 4 - stage
    return StageProblem(costs, layers, in_flight, int(costs.activation_bytes * layers * in_flight * share), windows)


@pytest.mark.parametrize(("flash", "binaries", "rows"), [(True, 73, 82), (False, 93, 102)])
def test_the_integer_program_has_the_size_of_a_transformer_layer(flash, binaries, rows):
    # Keep and five places to recompute (F1, F2, B1 or B2, C) for 16 and 20 units; on PCIe every window is open.
    problem = gpt(bandwidth=14e9, flash=flash, waits=False)
    program, _ = heu_program(problem, problem.options)
    assert program.num_variables == binaries
    assert program.num_rows == rows


@pytest.mark.parametrize("bandwidth", [14e9, 100e9, 230e9])
@pytest.mark.parametrize("flash", [False, True])
def test_overlap_is_never_worse_than_on_demand(bandwidth, flash):
    for share in (0.35, 0.6):
        problem = gpt(bandwidth=bandwidth, flash=flash, share=share)
        on_demand = solve_heu(replace(problem, windows=()))
        overlapped = solve_heu(problem)
        assert violations(problem, overlapped.tables[0]) == []
        assert overlapped.exposed <= on_demand.exposed * (1 + 1e-9)


def test_scan_and_integer_program_agree_on_a_transformer_layer():
    for problem in (gpt(), gpt(flash=True, stage=1), gpt("gpt-20b", 100e9, stage=2, share=0.6)):
        exact, _, complete = solve_program(problem, problem.options, 30.0)
        assert complete
        assert solve_heu(problem).exposed == pytest.approx(problem.num_layers * layer_cost(exact), rel=2e-3, abs=1e-9)


def test_a_search_that_is_cut_short_says_so():
    problem = gpt()
    result = scan(problem, reduced_options(problem), node_limit=3)
    assert not result.complete
    wide = replace(problem, layer=repeated(problem.layer, 3))
    wide = replace(wide, budget=3 * wide.budget)
    solution = solve_heu(wide, time_limit=1e-3)
    assert solution.fell_back
    assert violations(wide, solution.tables[0]) == []
    assert solution.bound <= solution.exposed


def test_the_smallest_budget_of_many_units_comes_from_the_integer_program():
    problem = gpt(share=0.4)
    wide = replace(problem, layer=repeated(problem.layer, 3), budget=1)
    with pytest.raises(InfeasibleBudget, match="memory_budget_gib") as error:
        solve_heu(wide, time_limit=0.05)
    smallest = error.value.smallest_budget
    assert smallest == smallest_budget(wide, wide.options)
    assert solve_heu(replace(wide, budget=smallest), time_limit=5.0).bytes == smallest


def repeated(layer, times):
    """A layer of several copies of another one, too many units to scan."""
    units = [
        replace(unit, name=f"{unit.name}{k}", inputs=tuple(f"{name}{k}" for name in unit.inputs))
        for k in range(times)
        for unit in layer.units
    ]
    return LayerCosts(tuple(units), layer.input_bytes)


def test_what_on_demand_means_without_windows_and_memory():
    layer = LayerCosts((UnitCosts("a", (), 4, 1.0), UnitCosts("b", ("a",), 4, 3.0)), 1)
    # Two layers, three micro-batches: inputs 6, keeping b 24, recomputing a 4.
    solution = solve_heu(StageProblem(layer, 2, 3, budget=34))
    assert solution.tables == (UnitTable.of({"a": ON_DEMAND, "b": "keep"}),) * 2
    assert (solution.exposed, solution.bytes) == (2.0, 34)


def test_an_input_worth_keeping_that_the_backward_does_not_need():
    # Four micro-batches: keeping a and recomputing b takes 8 + 3 bytes, keeping b 12, recomputing both 5.
    units = (UnitCosts("a", (), 2, 5.0, needed=False), UnitCosts("b", ("a",), 3, 1.0))
    problem = StageProblem(LayerCosts(units, 0), num_layers=1, in_flight=4, budget=11)
    solution = solve_heu(problem)
    assert solution.exposed == 1.0
    assert solution.tables[0].to_json() == {"a": "keep", "b": ON_DEMAND}
    assert solve_heu(replace(problem, budget=12)).tables[0].to_json() == {"a": "unused", "b": "keep"}


def test_problems_that_make_no_sense_are_refused():
    layer = LayerCosts((UnitCosts("a", (), 4, 1.0),), 1)
    for layers, in_flight in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="one layer and one micro-batch"):
            StageProblem(layer, layers, in_flight, 10)
    nan = wait_window(float("nan"), 0.0)
    with pytest.raises(ConfigError) as error:
        StageProblem(layer, 1, 1, 10, (nan, wait_window(1.0, 2.0), replace(nan, name="keep", capacity=1.0)))
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError, match="finite") as error:
        LayerCosts((UnitCosts("a", (), 4, float("nan")), UnitCosts("b", (), -1, 1.0)), 1)
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match="'b', which is no unit"):
        LayerCosts((UnitCosts("a", (), 4, 1.0, view_of="b"),), 1)


def test_a_budget_too_small_says_what_would_do():
    layer = LayerCosts((UnitCosts("a", (), 3 * 2**30, 1.0),), 2**30)
    with pytest.raises(InfeasibleBudget) as error:
        solve_heu(StageProblem(layer, 2, 2, budget=2**30))
    assert error.value.smallest_budget == 7 * 2**30
    assert "7.000 GiB of activations" in str(error.value)
    assert "Raise it by 6.000" in str(error.value)
    assert isinstance(error.value, InfeasibleError)
    assert solve_heu(StageProblem(LayerCosts((), 1), 2, 2, budget=4)).bytes == 4
