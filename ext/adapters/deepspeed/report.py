"""What an engine measured: step time, bubbles, times per stage; and what the simulator makes of the same times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ext.pipeline.plan import Plan
from ext.pipeline.simulate import simulate
from ext.pipeline.trace import (
    MeanTimes,
    StepTrace,
    hand_over,
    mean_times,
    measured_costs,
    simulated_trace,
)
from ext.runtime.tracing import gather_steps

if TYPE_CHECKING:
    from ext.adapters.deepspeed.engine import PlanPipelineEngine

NUM_STEPS = 4


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
        bubble: measured share of the pipeline time in which the stage's rank did not compute.
        simulated_bubble: the same in the simulation.
        times: mean times of its actions for one micro-batch, seconds.
    """

    bubble: float
    simulated_bubble: float
    times: MeanTimes


@dataclass(frozen=True)
class StepReport:
    """Training steps as measured, and as the simulator has them for the measured mean times and hand-over.

    Attributes:
        num_steps: how many steps the figures are means of.
        step_time_s: of a whole step, loading of data, reductions and optimizer included.
        pipeline_time_s: from the first action's start to the last one's end, over all stages.
        bubble: share of all stages' pipeline time in which they did not compute.
        hand_over_s: between the end of an action and the start of one that waited for its message.
        simulated_step_time_s: simulated pipeline time plus what the measured step takes beside its pipeline.
        simulated_pipeline_time_s: what the plan takes with these times.
        simulated_bubble: its bubble.
        stages: by stage.
    """

    num_steps: int
    step_time_s: float
    pipeline_time_s: float
    bubble: float
    hand_over_s: float
    simulated_step_time_s: float
    simulated_pipeline_time_s: float
    simulated_bubble: float
    stages: tuple[StageReport, ...]


def measure(engine: PlanPipelineEngine, num_steps: int = NUM_STEPS) -> StepReport | None:
    """What the last training steps took; None before the first one.

    Collective over the pipeline that the rank belongs to: each of several replicas reports its own. Stages on several
    hosts are compared by these hosts' clocks. Leaves the first step of a run, which allocates and connects, out as soon
    as there are others.

    Args:
        engine: as `ext.initialize` returns it, with an ``"ext"`` block.
        num_steps: how many of the last steps to look at; fewer where fewer were made.
    """
    group = engine.grid.get_pipe_parallel_group()
    gathered = gather_steps(engine.recorder, num_steps + 1, group, engine.num_stages)
    if not gathered:
        return None
    gathered = gathered[1:] or gathered
    return report(engine.plan, [trace for trace, _ in gathered], [seconds for _, seconds in gathered])


def report(plan: Plan, traces: list[StepTrace], step_times_s: list[float]) -> StepReport:
    """The report of measured steps of a plan.

    Args:
        plan: what ran.
        traces: at least one step.
        step_times_s: the whole time of each.
    """
    times, latency = mean_times(traces, plan.num_stages), hand_over(traces)
    simulated = simulated_trace(simulate(plan, measured_costs(times, latency)))
    step_time_s, pipeline_time_s = _mean(step_times_s), _mean([trace.pipeline_time for trace in traces])
    bubbles = [_mean(list(of_rank)) for of_rank in zip(*(trace.bubbles for trace in traces), strict=True)]
    return StepReport(
        num_steps=len(traces),
        step_time_s=step_time_s,
        pipeline_time_s=pipeline_time_s,
        bubble=_mean(bubbles),
        hand_over_s=latency,
        simulated_step_time_s=simulated.pipeline_time + step_time_s - pipeline_time_s,
        simulated_pipeline_time_s=simulated.pipeline_time,
        simulated_bubble=simulated.bubble,
        stages=tuple(
            StageReport(bubbles[rank], simulated.bubbles[rank], times[stage]) for stage, rank in enumerate(plan.rank_of)
        ),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
