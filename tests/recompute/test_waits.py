import subprocess
import sys

import pytest

from ext.pipeline.build import build_plan
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import simulate
from ext.recompute.lynx import LynxHeu, LynxOpt
from ext.recompute.problem import InfeasibleBudget, StageProblem
from ext.recompute.units import LayerCosts, UnitCosts
from ext.recompute.waits import stage_waits
from ext.recompute.windows import one_f_one_b_waits

LAYERS = 2


def simulated(schedule, ranks, microbatches, forward=1.0):
    made = SCHEDULES.get(schedule)(shape=PipelineShape(ranks, microbatches))
    plan = build_plan(made, layers_per_stage=(LAYERS,) * ranks, recomputed_layers=(0,) * ranks)
    return simulate(plan, Costs((StageCosts(forward, 1.0, 1.0),) * ranks))


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_1f1b_waits_as_its_closed_form_says(ranks, microbatches):
    simulation = simulated("1f1b", ranks, microbatches)
    for rank in range(ranks):
        found = stage_waits(simulation, rank, LAYERS)
        expected = one_f_one_b_waits(rank, ranks, microbatches, 1.0 / LAYERS)
        if rank == ranks - 1:
            assert found.window == expected == ()
            continue
        (window,), (closed,) = found.window, expected
        # The first backward waits longer than a recompute can last, those of the cool-down a forward each.
        assert window.capacity == pytest.approx(closed.capacity)
        assert window.exposed == pytest.approx(closed.exposed)
        assert found.microbatches == {0, *range(microbatches - (ranks - 1 - rank), microbatches)}


def test_a_schedule_without_waits_has_no_window():
    found = stage_waits(simulated("gpipe", 2, 4), 1, LAYERS)
    assert found.window == ()
    assert found.microbatches == frozenset()
    assert stage_waits(simulated("1f1b", 2, 4), 0, 0).window == ()


def test_policies_solve_within_their_limits():
    layer = LayerCosts((UnitCosts("a", (), 4, 1.0), UnitCosts("b", ("a",), 4, 3.0)), 1)
    problem = StageProblem(layer, 2, 3, budget=34)
    for policy in (LynxHeu(), LynxOpt(LynxOpt.Config(time_limit_s=1.0))):
        assert policy.solve(problem).exposed == pytest.approx(2.0)
        with pytest.raises(InfeasibleBudget):
            policy.solve(StageProblem(layer, 2, 3, budget=5))
        assert policy.recomputed_layers([2, 2], [True, False]) == (2, 0)


def test_reading_policies_imports_neither_torch_nor_scipy():
    code = "import sys, ext.recompute.lynx, ext.recompute.profile_file; print({'torch', 'scipy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
