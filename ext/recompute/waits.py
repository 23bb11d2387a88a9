"""Pipeline waits of any schedule as a window: which backwards find their rank idle before them, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from ext.pipeline.actions import B, F, I
from ext.pipeline.simulate import Simulation
from ext.recompute.windows import Window, wait_window


@dataclass(frozen=True)
class StageWaits:
    """The waits of one stage that recomputation is to fill.

    Attributes:
        window: per layer; empty where there is nothing to fill.
        microbatches: that have the wait, so an R action before their backward.
    """

    window: tuple[Window, ...]
    microbatches: frozenset[int]


def stage_waits(simulation: Simulation, stage: int, num_layers: int, slowdown: float = 1.0) -> StageWaits:
    """The waits before the backwards of a stage, as the simulator sees them without recomputation.

    One table serves all micro-batches of a stage, so the window has one length: that for which length times number of
    micro-batches that wait at least as long is largest. It is no longer than the stage's forward, of which a recompute
    is a part.

    Args:
        simulation: of the schedule's plan with costs that hold no recomputation.
        stage: whose backwards.
        num_layers: recomputed layers of the stage, which share the window.
        slowdown: see `Window`.
    """
    plan = simulation.plan
    timeline = simulation.timeline[plan.rank_of[stage]]
    forward = max(
        timed.end - timed.start for timed in timeline if timed.action.kind is F and timed.action.stage == stage
    )
    waits: dict[int, float] = {}
    for before, timed in zip(timeline, timeline[1:], strict=False):
        if timed.action.stage == stage and timed.action.kind in (B, I):
            waits[timed.action.microbatch] = min(forward, timed.start - before.end)
    best = max(waits.values(), key=lambda length: length * _as_long(waits, length), default=0.0)
    # What rounding leaves between two actions is no wait.
    if best <= 1e-9 * simulation.step_time or num_layers == 0:
        return StageWaits((), frozenset())
    chosen = frozenset(m for m, wait in waits.items() if wait >= best)
    window = wait_window(best / num_layers, 1 - len(chosen) / plan.num_microbatches, slowdown)
    return StageWaits((window,), chosen)


def _as_long(waits: dict[int, float], length: float) -> int:
    return sum(wait >= length for wait in waits.values())
