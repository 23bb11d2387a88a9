"""What the report says a table will do, and what an engine did."""

import pytest
import torch

from ext.recompute.heu import solve_heu
from ext.recompute.problem import Solution, StageProblem, evaluate
from ext.recompute.profile import profile_layer
from ext.recompute.report import ByteReserve, RecomputeReport, predicted_windows, summary
from ext.recompute.stage_tables import Part
from ext.recompute.table import UnitTable
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.recompute.units import MLP, LayerCosts, UnitCosts
from ext.recompute.windows import ON_DEMAND, backward_windows, wait_window
from ext.testing.unit_layer import UnitLayer


def stage(windows):
    units = (
        UnitCosts("a", (), 8, 1.0),
        UnitCosts("b", ("a",), 4, 2.0, half=MLP),
        UnitCosts("c", ("b",), 2, 4.0, half=MLP),
    )
    return StageProblem(LayerCosts(units, input_bytes=1), num_layers=3, in_flight=2, budget=10**6, windows=windows)


def test_windows_are_predicted_with_what_of_them_is_exposed():
    problem = stage((wait_window(5.0, 0.25), backward_windows(0.0, 9.0)[1]))
    table = UnitTable.of({"a": "P", "b": "B2", "c": ON_DEMAND})
    solution = Solution((table,) * 3, *evaluate(problem, (table,) * 3), "test")
    used = predicted_windows(problem, solution)
    # A quarter of the micro-batches has no wait; the last of the three layers has no B2.
    assert {name: (use.units, use.seconds, use.exposed) for name, use in used.items()} == {
        "P": (3, 3.0, 0.75),
        "B2": (3, 6.0, 2.0),
        ON_DEMAND: (3, 12.0, 12.0),
    }
    assert solution.exposed == pytest.approx(sum(use.exposed for use in used.values()))
    assert Part((0, 1, 2), problem, solution).saved_bytes == 3 * (8 + 4 + 2)


def test_rows_set_measured_beside_planned():
    layers = [UnitLayer(16, 2, dropout=0.1, seed=i) for i in range(2)]
    x = torch.randn(2, 8, 16, requires_grad=True)
    costs = profile_layer(layers[0], x, repeats=1)
    windows = (wait_window(costs.forward, 0.5),)
    problem = StageProblem(costs, 2, 3, int(costs.activation_bytes * 2 * 3 * 0.6), windows)
    solution = solve_heu(problem)
    surroundings = Surroundings()
    for early in (True, False):
        microbatch = MicrobatchUnits(surroundings)
        y = x
        for layer, table in zip(layers, solution.tables, strict=True):
            y = microbatch.call(layer, y, table)
        if early:
            microbatch.recompute()
        with microbatch.backward():
            y.sum().backward()
    rows = {row["window"]: row for row in surroundings.report.rows(problem, solution)}
    assert list(rows) == ["P", ON_DEMAND]
    planned = sum(row["units_planned"] for row in rows.values())
    assert planned == sum(row["units"] for row in rows.values()) > 0
    # What P was given ran in it for one of the two micro-batches.
    assert rows["P"]["units"] == rows["P"]["units_planned"] / 2
    assert all(row["seconds"] >= 0 for row in rows.values())
    assert sum(surroundings.report.measured().values()) == pytest.approx(sum(row["seconds"] for row in rows.values()))
    text = summary(list(rows.values()))
    assert text.splitlines()[1].split()[0] == "P"
    assert len(text.splitlines()) == 3


def test_a_report_without_work_is_empty():
    problem = stage(())
    table = UnitTable.of({})
    rows = RecomputeReport().rows(problem, Solution((table,) * 3, 0.0, 0, "test"))
    assert rows == [
        {
            "window": ON_DEMAND,
            "units_planned": 0,
            "units": 0.0,
            "bytes_planned": 0,
            "bytes": 0.0,
            "seconds_planned": 0.0,
            "exposed_planned": 0.0,
            "seconds": 0.0,
        }
    ]


def test_a_reserve_counts_up_and_down():
    reserve = ByteReserve(10)
    reserve.take(8)
    assert not reserve.allows(3)
    assert reserve.allows(2)
    reserve.give(8)
    reserve.take(1)
    assert (reserve.live, reserve.peak) == (1, 8)
    assert ByteReserve().allows(10**18)
