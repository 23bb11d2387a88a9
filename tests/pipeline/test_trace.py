"""Traces: bubbles, mean times and hand-over of spans made by hand and by the simulator."""

from __future__ import annotations

import pytest

from ext.pipeline.build import build_plan, default_recompute
from ext.pipeline.costs import Costs
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import Simulation, simulate
from ext.pipeline.trace import (
    MeanTimes,
    Span,
    StepTrace,
    hand_over,
    mean_times,
    measured_costs,
    simulated_trace,
    with_idle,
)

NAMES = tuple(name for name in SCHEDULES if SCHEDULES.get(name).has_rule)


def run(name: str, p: int = 4, m: int = 8, latency: float = 0.0) -> Simulation:
    cls, shape, layers = SCHEDULES.get(name), PipelineShape(p, m), (2,) * p
    recomputed = default_recompute(cls(shape=shape), layers)
    costs = Costs(stage_costs(LayerCosts(0.5, 0.6, 0.4, 0.5, 1.0), layers, recomputed), latency=latency)
    return simulate(build_plan(cls(shape=shape), layers_per_stage=layers, recomputed_layers=recomputed), costs)


@pytest.mark.parametrize("latency", [0.0, 0.2])
@pytest.mark.parametrize("name", NAMES)
def test_a_simulations_trace_has_its_times_and_bubbles(name, latency):
    simulation = run(name, latency=latency)
    trace = simulated_trace(simulation, seconds=0.01)
    assert trace.pipeline_time == pytest.approx(simulation.step_time * 0.01)
    assert trace.bubble == pytest.approx(simulation.bubble_share)
    for busy, bubble in zip(simulation.busy, trace.bubbles, strict=True):
        assert bubble == pytest.approx(1 - busy / simulation.step_time)


@pytest.mark.parametrize("latency", [0.0, 0.2])
@pytest.mark.parametrize("name", NAMES)
def test_means_and_hand_over_of_a_simulation_give_the_same_simulation(name, latency):
    simulation = run(name, latency=latency)
    traces = [simulated_trace(simulation), simulated_trace(simulation, step=1)]
    times = mean_times(traces, 4)
    assert times[0].forward == pytest.approx(1.0)
    assert times[0].recompute == pytest.approx(1.0 if simulation.plan.recomputed_layers[0] else 0.0)
    assert times[0].backward + times[0].input_grad + times[0].weight_grad == pytest.approx(2.0)
    assert hand_over(traces) == pytest.approx(latency)
    again = simulate(simulation.plan, measured_costs(times, hand_over(traces)))
    assert again.step_time == pytest.approx(simulation.step_time)
    assert again.busy == pytest.approx(simulation.busy)


def test_a_wait_is_idle_until_its_message_is_made():
    trace = simulated_trace(run("1f1b", p=3, m=2, latency=0.25))
    row = [(span.name, span.microbatch, span.start, span.end) for span in trace.rows[1]]
    assert row == [
        ("idle", 0, 0, 1),
        ("RECV_F", 0, 1, 1.25),
        ("F", 0, 1.25, 2.25),
        ("F", 1, 2.25, 3.25),
        ("idle", 0, 3.25, 5.5),
        ("RECV_B", 0, 5.5, 5.75),
        ("B", 0, 5.75, 7.75),
        ("idle", 1, 7.75, 8.5),
        ("RECV_B", 1, 8.5, 8.75),
        ("B", 1, 8.75, 10.75),
        ("idle", -1, 10.75, 13.0),
    ]


def test_gaps_are_idle():
    rows = (
        (Span("F", 0, 0, 10.0, 11.0), Span("B", 0, 0, 14.0, 16.0), Span("OPTIMIZER", 0, -1, 17.0, 19.0)),
        (Span("F", 1, 0, 11.5, 12.0), Span("B", 1, 0, 12.0, 13.0), Span("R", 1, 0, 12.0, 12.5, inline=True)),
    )
    trace = with_idle(StepTrace(7, rows))
    idle = [(rank, span.start, span.end) for rank, row in enumerate(trace.rows) for span in row if span.name == "idle"]
    assert idle == [(0, 11, 14), (0, 16, 17), (1, 10, 11.5), (1, 13, 16)]
    assert [[span for span in row if span.name != "idle"] for row in trace.rows] == [list(row) for row in rows]


def _hand_made() -> StepTrace:
    rows = (
        (
            Span("LOAD", 0, 0, 0.0, 1.0),
            Span("F", 0, 0, 1.0, 2.0),
            Span("SEND_F", 0, 0, 2.0, 2.25),
            Span("RECV_B", 0, 0, 2.25, 7.0),
            Span("B", 0, 0, 7.0, 10.0),
            Span("R", 0, 0, 7.0, 7.5, inline=True),
            Span("R", 0, 0, 7.75, 8.25, inline=True),
            Span("OPTIMIZER", 0, -1, 10.0, 14.0),
        ),
        (
            Span("RECV_F", 1, 0, 0.5, 3.0),
            Span("F", 1, 0, 3.0, 4.0),
            Span("I", 1, 0, 4.0, 6.0),
            Span("W", 1, 0, 6.0, 6.5),
        ),
    )
    return StepTrace(3, rows)


def test_a_measured_step():
    trace = _hand_made()
    # From the first compute at 1 to the last at 10: data and optimizer are outside.
    assert (trace.start, trace.end, trace.pipeline_time) == (1.0, 10.0, 9.0)
    assert trace.bubbles == pytest.approx((1 - 4 / 9, 1 - 3.5 / 9))
    assert trace.bubble == pytest.approx(1 - 7.5 / 18)
    assert mean_times([trace], 2) == (MeanTimes(1, 2, 0, 0, 1), MeanTimes(1, 0, 2, 0.5, 0))


def test_hand_over_cancels_clocks_that_differ_and_ignores_messages_that_were_there():
    # F of stage 0 ends at 2, stage 1 goes on at 3; I of stage 1 ends at 6, stage 0 goes on at 7.
    assert hand_over([_hand_made()]) == 1.0
    late = [span._replace(start=span.start + 0.5, end=span.end + 0.5) for span in _hand_made().rows[1]]
    assert hand_over([StepTrace(3, (_hand_made().rows[0], tuple(late)))]) == 1.0
    there = [span._replace(start=2.5) if span.name == "RECV_F" else span for span in _hand_made().rows[1]]
    there = [span._replace(start=6.5) if span.name == "RECV_B" else span for span in there]
    assert hand_over([StepTrace(3, (_hand_made().rows[0][:3], tuple(there)))]) == 0.0


def test_a_step_without_spans():
    trace = StepTrace(0, ((), ()))
    assert trace.bubbles == (0.0, 0.0)
    assert mean_times([], 1) == (MeanTimes(0, 0, 0, 0, 0),)
