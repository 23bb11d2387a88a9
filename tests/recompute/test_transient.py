"""What recomputes hold at once: as the unit engine counts it, and what solvers make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ext.recompute.heu import solve_heu
from ext.recompute.opt import solve_opt
from ext.recompute.problem import InfeasibleBudget, StageProblem, evaluate
from ext.recompute.profile import profile_layer
from ext.recompute.table import UnitTable
from ext.recompute.transient import held_bytes, solve_tightly, transient_bytes
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.recompute.units import MLP, LayerCosts, UnitCosts
from ext.recompute.windows import forward_windows
from ext.testing.unit_layer import UnitLayer


def chain(*units):
    """Each unit reads the one before; given are name, bytes, whether a backward needs it, and the half."""
    names = [name for name, *_ in units]
    return LayerCosts(
        tuple(
            UnitCosts(name, tuple(names[max(0, i - 1) : i]), size, 1.0, needed=needed, half=half)
            for i, (name, size, needed, half) in enumerate(units)
        ),
        1,
    )


ATTENTION_AND_MLP = chain(
    ("scores", 100, False, "attention"),
    ("probs", 100, True, "attention"),
    ("dropped", 90, True, "attention"),
    ("sum", 7, True, MLP),
    ("gelu", 150, True, MLP),
)


def on_demand(*names):
    return UnitTable.of(dict.fromkeys(names, "C"))


@pytest.mark.parametrize(
    ("dropped", "most"),
    [
        (("gelu",), 150),
        (("dropped",), 90),
        (("probs", "dropped"), 190),
        (("scores", "probs", "dropped"), 200),  # scores and probs; dropped takes the place of the scores
        (("scores", "probs", "dropped", "gelu"), 200),  # gelu is gone by then
        (("sum", "gelu"), 157),
        ((), 0),
    ],
)
def test_values_go_as_the_backward_passes_them(dropped, most):
    assert transient_bytes(ATTENTION_AND_MLP, on_demand(*dropped)) == most


def test_values_from_windows_of_the_backward_count_throughout():
    table = UnitTable.of({"probs": "B1", "gelu": "C"})
    assert transient_bytes(ATTENTION_AND_MLP, table) == 250
    assert transient_bytes(ATTENTION_AND_MLP, table, ("B1",)) == 100
    assert transient_bytes(ATTENTION_AND_MLP, UnitTable.of({"probs": "P", "gelu": "C"})) == 150


@pytest.mark.parametrize("byte_masks", [False, True])
def test_the_unit_engine_holds_no_more(byte_masks):
    torch.manual_seed(0)
    layer = UnitLayer(16, 2, dropout=0.1, byte_masks=byte_masks)
    x = torch.randn(2, 12, 16).requires_grad_()
    costs = profile_layer(layer, x, 1)
    names = [unit.name for unit in costs.units]
    generator = torch.Generator().manual_seed(1)
    tight = 0
    for _ in range(60):
        drawn = torch.rand(len(names), generator=generator) < 0.6
        table = on_demand(*(name for name, dropped in zip(names, drawn, strict=True) if dropped and name != "out"))
        at = Surroundings()
        units = MicrobatchUnits(at)
        output = units.call(layer, x, table)
        with units.backward():
            output.sum().backward()
        most = transient_bytes(costs, table)
        assert at.reserve.peak <= most
        tight += at.reserve.peak == most
    assert tight > 15


def problem(budget, num_layers=3, in_flight=1, windows=()):
    return StageProblem(ATTENTION_AND_MLP, num_layers, in_flight, budget, windows)


def test_memory_that_is_free_again_is_used():
    # Three layers keep sum and probs; gelu (150) is brought back and gone before dropped (90).
    budget = 3 * (1 + 7 + 100) + 150
    for solve in (solve_heu, solve_opt):
        found = solve_tightly(problem(budget), solve)
        assert found.bytes == held_bytes(problem(budget), found.tables) <= budget
        assert found.exposed == 3 * 2.0 < solve(problem(budget)).exposed


def test_the_smallest_budget_can_be_kept():
    with pytest.raises(InfeasibleBudget) as plain:
        solve_heu(problem(0))
    with pytest.raises(InfeasibleBudget) as refused:
        solve_tightly(problem(0), solve_heu)
    least = refused.value.smallest_budget
    assert least < plain.value.smallest_budget
    assert solve_tightly(problem(least), solve_heu).bytes <= least
    with pytest.raises(InfeasibleBudget):
        solve_tightly(problem(least - 1), solve_heu)


@st.composite
def problems(draw):
    names = "abcdef"[: draw(st.integers(2, 6))]
    units = []
    for i, name in enumerate(names):
        inputs = tuple(n for n in names[:i] if draw(st.booleans()))
        size, time = draw(st.integers(0, 9)), float(draw(st.integers(0, 5)))
        half = draw(st.sampled_from(["attention", MLP]))
        units.append(UnitCosts(name, inputs, size, time, needed=draw(st.booleans()), half=half))
    windows = forward_windows(float(draw(st.integers(0, 4))), 1.0) if draw(st.booleans()) else ()
    layers, in_flight, budget = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 60))
    return StageProblem(LayerCosts(tuple(units), 1), layers, in_flight, budget, windows)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_budgets_are_kept_and_nothing_gets_worse(problem):
    try:
        plain = solve_heu(problem)
    except InfeasibleBudget:
        plain = None
    try:
        found = solve_tightly(problem, solve_heu)
    except InfeasibleBudget as refused:
        least = refused.smallest_budget
        found = solve_tightly(replace(problem, budget=least), solve_heu)
        problem = replace(problem, budget=max(least, problem.budget + 1))
    assert found.bytes == held_bytes(problem, found.tables) <= problem.budget
    assert found.bytes <= evaluate(problem, found.tables)[1]
    assert plain is None or found.exposed <= plain.exposed
