"""Text grids of every schedule: a change in any of them shows as a readable diff."""

from __future__ import annotations

import pytest

from ext.pipeline.actions import parse_order
from ext.pipeline.build import build_plan, full_recompute
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.grid import grid
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import Simulation, simulate


def run(name: str, p: int, m: int, *, f=1.0, b=1.0, w=1.0, r=1.0, recompute=True, latency=0.0) -> Simulation:
    schedule = SCHEDULES.get(name)(shape=PipelineShape(p, m))
    recomputed = full_recompute(schedule, (1,) * p) if recompute else (0,) * p
    stages = tuple(StageCosts(f, b, w, recompute=r if again else 0.0) for again in recomputed)
    costs = Costs(stages, latency=latency)
    return simulate(build_plan(schedule, layers_per_stage=(1,) * p, recomputed_layers=recomputed), costs)


WORKED_EXAMPLE = """
    S0|F0 F1 F2 F3 .  .  .  .  .  .  r0 B0 B0 F4 r1 B1 B1 F5 r2 B2 B2 F6 r3 B3 B3 F7 r4 B4 B4 R5 B5 B5 R6 B6 B6 R7 B7 B7
    S1|.  F0 F1 F2 R0 .  .  .  B0 B0 F3 r1 B1 B1 F4 r2 B2 B2 F5 r3 B3 B3 F6 r4 B4 B4 F7 r5 B5 B5 R6 B6 B6 R7 B7 B7 .  .
    S2|.  .  F0 F1 F2 R0 B0 B0 R1 B1 B1 F3 r2 B2 B2 F4 r3 B3 B3 F5 r4 B4 B4 F6 r5 B5 B5 F7 r6 B6 B6 r7 B7 B7 .  .  .  .
    S3|.  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  F4 B4 B4 .  F5 B5 B5 .  F6 B6 B6 .  F7 B7 B7 .  .  .  .  .  .  .
"""

RECOMPUTED = {
    "1f1b": """
        S0|F0 F1 F2 .  .  .  .  .  .  r0 B0 B0 F3 r1 B1 B1 F4 r2 B2 B2 .  r3 B3 B3 .  r4 B4 B4
        S1|.  F0 F1 .  .  .  r0 B0 B0 F2 r1 B1 B1 F3 r2 B2 B2 F4 r3 B3 B3 .  r4 B4 B4 .  .  .
        S2|.  .  F0 r0 B0 B0 F1 r1 B1 B1 F2 r2 B2 B2 F3 r3 B3 B3 F4 r4 B4 B4 .  .  .  .  .  .
    """,
    "early_recompute": """
        S0|F0 F1 F2 .  .  .  .  .  .  r0 B0 B0 F3 r1 B1 B1 F4 r2 B2 B2 R3 B3 B3 R4 B4 B4
        S1|.  F0 F1 .  .  .  r0 B0 B0 F2 r1 B1 B1 F3 r2 B2 B2 F4 r3 B3 B3 R4 B4 B4 .  .
        S2|.  .  F0 r0 B0 B0 F1 r1 B1 B1 F2 r2 B2 B2 F3 r3 B3 B3 F4 r4 B4 B4 .  .  .  .
    """,
    "gpipe": """
        S0|F0 F1 F2 F3 F4 .  .  .  .  .  .  .  .  r0 B0 B0 r1 B1 B1 r2 B2 B2 r3 B3 B3 r4 B4 B4
        S1|.  F0 F1 F2 F3 F4 .  .  .  .  r0 B0 B0 r1 B1 B1 r2 B2 B2 r3 B3 B3 r4 B4 B4 .  .  .
        S2|.  .  F0 F1 F2 F3 F4 r0 B0 B0 r1 B1 B1 r2 B2 B2 r3 B3 B3 r4 B4 B4 .  .  .  .  .  .
    """,
    "last_no_recompute": """
        S0|F0 F1 F2 .  .  .  .  r0 B0 B0 F3 r1 B1 B1 F4 r2 B2 B2 R3 B3 B3 R4 B4 B4
        S1|.  F0 F1 R0 .  B0 B0 F2 r1 B1 B1 F3 r2 B2 B2 F4 r3 B3 B3 r4 B4 B4 .  .
        S2|.  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  F3 B3 B3 .  F4 B4 B4 .  .  .  .  .
    """,
    "shifted_critical_path": """
        S0|F0 F1 F2 R0 .  .  .  B0 B0 F3 r1 B1 B1 F4 r2 B2 B2 R3 B3 B3 R4 B4 B4
        S1|.  F0 F1 F2 R0 B0 B0 R1 B1 B1 F3 r2 B2 B2 F4 r3 B3 B3 r4 B4 B4 .  .
        S2|.  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  F4 B4 B4 .  .  .  .  .
    """,
    "zb_h1": """
        S0|F0 F1 F2 .  .  .  .  r0 I0 W0 F3 r1 I1 W1 F4 r2 I2 W2 r3 I3 W3 r4 I4 W4
        S1|.  F0 F1 .  .  r0 I0 F2 r1 I1 W0 F3 r2 I2 W1 F4 r3 I3 W2 r4 I4 W3 W4 .
        S2|.  .  F0 r0 I0 F1 r1 I1 F2 r2 I2 W0 F3 r3 I3 W1 F4 r4 I4 W2 W3 W4 .  .
    """,
}

KEPT = {
    "1f1b": """
        S0|F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        S1|.  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        S2|.  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
    """,
    "gpipe": """
        S0|F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        S1|.  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        S2|.  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
    """,
    "shifted_critical_path": """
        S0|F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        S1|.  F0 F1 F2 .  B0 B0 .  B1 B1 F3 B2 B2 .  B3 B3 .  .
        S2|.  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
    """,
    "zb_h1": """
        S0|F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        S1|.  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        S2|.  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
}


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_worked_example():
    assert lines(grid(run("shifted_critical_path", 4, 8))) == lines(WORKED_EXAMPLE)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES.get(name).has_rule])
def test_every_schedule_with_everything_recomputed_that_may_be(name):
    assert lines(grid(run(name, 3, 5))) == lines(RECOMPUTED[name])


@pytest.mark.parametrize("name", tuple(KEPT))
def test_schedules_that_keep_everything(name):
    assert lines(grid(run(name, 3, 4, recompute=False))) == lines(KEPT[name])


def test_a_column_is_the_largest_unit_that_divides_all_times():
    assert lines(grid(run("1f1b", 2, 2, recompute=False, f=0.3, b=0.2, w=0.4, latency=0.1))) == [
        "S0|F0 F0 F0 F1 F1 F1 .  .  .  .  .  .  .  .  B0 B0 B0 B0 B0 B0 .  .  .  B1 B1 B1 B1 B1 B1",
        "S1|.  .  .  .  F0 F0 F0 B0 B0 B0 B0 B0 B0 F1 F1 F1 B1 B1 B1 B1 B1 B1 .  .  .  .  .  .  .",
    ]


def test_long_simulations_are_sampled():
    rows = lines(grid(run("1f1b", 2, 2, recompute=False, b=1.37, w=0.78, latency=0.113), max_columns=20))
    assert rows == [
        "S0|F0 F0 F1 F1 .  .  .  .  .  B0 B0 B0 B0 .  .  .  B1 B1 B1 B1",
        "S1|.  .  F0 F0 B0 B0 B0 B0 B0 F1 F1 B1 B1 B1 B1 .  .  .  .  .",
    ]
    assert all(len(row) <= 3 + 20 * 4 for row in lines(grid(run("1f1b", 3, 50, b=1.0001), max_columns=20)))


def test_several_stages_on_a_rank_are_named():
    orders = ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    plan = Plan("x", 1, (0, 1, 1, 0), tuple(tuple(parse_order(o)) for o in orders), (1,) * 4, (0, 1, 0, 0))
    keep, drop = StageCosts(1, 1, 1), StageCosts(1, 1, 1, recompute=1)
    assert lines(grid(simulate(plan, Costs((keep, drop, keep, keep))))) == [
        "S0,3|0F0 .   .   3F0 3B0 3B0 .   .   .   .   .   0B0 0B0",
        "S1,2|.   1F0 2F0 .   .   .   2B0 2B0 1r0 1B0 1B0 .   .",
    ]
