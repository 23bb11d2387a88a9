"""The simulator: when every action of a plan runs, and what memory and bubbles follow.

A discrete-event model: a rank runs its actions one after another; an action starts once its rank is free and the
message it needs has arrived, latency + size / bandwidth after the end of the action that makes it. Sending never
delays the sender. Recomputation counts as busy time. All figures are in the units of the costs.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

from ext.core.errors import ScheduleError
from ext.pipeline.actions import Action, B, F, R, W
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.plan import Plan
from ext.pipeline.timing import NEVER, OrderCosts


class TimedAction(NamedTuple):
    """One compute action with its times.

    Attributes:
        action: what runs.
        start: when it starts.
        end: when it ends.
        recompute: how much of it is recomputation, at its beginning: all of an R, the inline part of a B or I.
    """

    action: Action
    start: float
    end: float
    recompute: float


@dataclass(frozen=True)
class Simulation:
    """What a plan costs under given costs.

    Attributes:
        plan: what was simulated.
        timeline: compute actions of each rank in their order, by rank.
        step_time: end of the last action.
        busy: time each rank computes, recomputation included, by rank.
        recompute: part of ``busy`` that is recomputation, by rank.
        peak_activations: most activations held at once, by rank. F adds what it keeps at its start, R the
            dropped part at its start; a B with the recompute inside holds the working set while it runs and frees
            the micro-batch at its end; an I holds more while it runs, as `SplitMemory` has it, and leaves at its end
            what W frees at its own. Without a `SplitMemory` that is the dropped part, and all but the stash.
        peak_in_flight: most micro-batches that have started F and not ended B or W at once, by rank.
    """

    plan: Plan
    timeline: tuple[tuple[TimedAction, ...], ...]
    step_time: float
    busy: tuple[float, ...]
    recompute: tuple[float, ...]
    peak_activations: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @cached_property
    def bubble_share(self) -> float:
        """Idle share of all ranks' time: 1 - busy / (ranks x step time)."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.step_time)

    @cached_property
    def recompute_share(self) -> float:
        """Recomputing share of all ranks' time: recompute / (ranks x step time)."""
        return sum(self.recompute) / (len(self.busy) * self.step_time)


def simulate(plan: Plan, costs: Costs) -> Simulation:
    """Time a plan and count its memory.

    Args:
        plan: with or without communication; a message travels whether or not the plan names it.
        costs: of every stage of the plan.

    Raises:
        ScheduleError: some rank would wait for ever.
        ValueError: the costs are of another number of stages, negative or not finite, all zero, or recompute
            where the plan does not.
    """
    _check_costs(plan, costs)
    model = OrderCosts(costs, plan.rank_of, plan.num_microbatches)
    encoded = [model.codes.encode(order) for order in plan.orders]
    ends, done = model.run(encoded)
    if NEVER in ends:
        stuck = [rank for rank, end in enumerate(ends) if end == NEVER]
        raise ScheduleError(f"ranks {stuck} wait for ever; validate the plan to see where.")
    timeline = tuple(_timeline(codes, model, costs, done) for codes in encoded)
    return Simulation(
        plan=plan,
        timeline=timeline,
        step_time=max(ends),
        busy=tuple(math.fsum(model.duration[code] for code in codes) for codes in encoded),
        recompute=tuple(math.fsum(timed.recompute for timed in row) for row in timeline),
        peak_activations=tuple(model.peak(codes) for codes in encoded),
        peak_in_flight=tuple(_peak_in_flight(plan.compute_order(rank)) for rank in range(plan.num_ranks)),
    )


def _timeline(codes: list[int], model: OrderCosts, costs: Costs, done: list[float]) -> tuple[TimedAction, ...]:
    """The actions of one rank with their times, from the times of all results."""
    waits_for, delay, duration = model.codes.waits_for, model.delay, model.duration
    row = []
    now = 0.0
    for code in codes:
        action, inline = model.codes.decode(code)
        start = max(now, done[waits_for[code]] + delay[code])
        now = start + duration[code]
        again = costs.stages[action.stage].recompute if inline or action.kind is R else 0.0
        row.append(TimedAction(action, start, now, again))
    return tuple(row)


def _peak_in_flight(order: tuple[Action, ...]) -> int:
    change = {F: 1, B: -1, W: -1}
    now = peak = 0
    for action in order:
        now += change.get(action.kind, 0)
        peak = max(peak, now)
    return peak


def _check_costs(plan: Plan, costs: Costs) -> None:
    if len(costs.stages) != plan.num_stages:
        raise ValueError(f"costs are of {len(costs.stages)} stages, the plan has {plan.num_stages}")
    numbers = [costs.latency, *(value for stage in costs.stages for value in _numbers(stage))]
    if not all(0 <= value < math.inf for value in numbers) or not costs.bandwidth > 0:
        raise ValueError(f"costs must be finite and at least 0, the bandwidth above 0: {costs}")
    if not any(stage.forward or stage.input_grad or stage.weight_grad for stage in costs.stages):
        raise ValueError("costs are all zero, no time passes")
    for stage, cost in enumerate(costs.stages):
        if plan.recomputed_layers[stage] == 0 and (cost.recompute or cost.dropped):
            raise ValueError(f"costs recompute on stage {stage}, where the plan keeps all activations")


def _numbers(stage: StageCosts) -> tuple[float, ...]:
    *numbers, _ = astuple(stage)
    return *numbers, *astuple(stage.split_memory)
