"""The lean core of the simulator: time and memory of orders given as action codes.

A search makes one `OrderCosts` per layout and calls it with many orders, each a list of codes per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from ext.pipeline.actions import B, F, I, Kind, R, W
from ext.pipeline.codes import OPERATIONS, action_codes
from ext.pipeline.costs import Costs, StageCosts

NEVER = float("inf")


class OrderCosts:
    """Durations and sizes of every action of a layout, and the loops over orders.

    Args:
        costs: by stage, and of a message between ranks.
        rank_of: rank of each stage, by stage.
        num_microbatches: micro-batches per step.

    Attributes:
        codes: turns actions into codes and back.
        duration: time of an action, by code.
        delay: time between the end of the awaited action and the arrival of its message, by code.
        adds: size that an action adds at its start, by code.
        holds: size that it holds only while it runs, by code.
        frees: size that it frees at its end, by code; below 0 where it leaves more than it found.
    """

    def __init__(self, costs: Costs, rank_of: tuple[int, ...], num_microbatches: int) -> None:
        self.codes = action_codes(rank_of, num_microbatches)
        stages, hops = costs.stages, self.codes.hops
        travel = [costs.latency + stage.message / costs.bandwidth for stage in stages]
        arrives = [travel[s - 1] if s and hops[s] else 0.0 for s in range(len(stages))]
        # A gradient is as large as the activations that the stage sent on.
        returns = [travel[s] if hops[s + 1] else 0.0 for s in range(len(stages))]
        delay = {F: arrives, B: returns, I: returns, W: repeat(0.0, len(stages)), R: repeat(0.0, len(stages))}

        def by_code(values: Sequence[float]) -> list[float]:
            return list(chain.from_iterable(repeat(value, num_microbatches) for value in values))

        self.duration = by_code([_duration(stage, *operation) for operation in OPERATIONS for stage in stages])
        self.delay = by_code([value for kind, _ in OPERATIONS for value in delay[kind]])
        sizes = [_sizes(stage, *operation) for operation in OPERATIONS for stage in stages]
        self.adds, self.holds, self.frees = (by_code(column) for column in zip(*sizes, strict=True))

    def run(self, orders: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
        """When each rank ends and when each result is there.

        Args:
            orders: codes of every rank, by rank; each rank's own order is taken to be legal (F before B ...).

        Returns:
            End of each rank, infinite where it waits for ever; time of each result by slot, -1 where missing.
        """
        waits_for, fills, duration, delay = self.codes.waits_for, self.codes.fills, self.duration, self.delay
        done = [-1.0] * self.codes.num_slots
        done[-2] = 0.0
        waiting = [-1] * len(done)
        position = [0] * len(orders)
        clock = [0.0] * len(orders)
        runnable = list(range(len(orders)))
        while runnable:
            rank = runnable.pop()
            order, now = orders[rank], clock[rank]
            for k in range(position[rank], len(order)):
                code = order[k]
                slot = waits_for[code]
                ready = done[slot]
                if ready < 0.0:
                    waiting[slot] = rank
                    position[rank] = k
                    break
                ready += delay[code]
                if ready > now:
                    now = ready
                now += duration[code]
                slot = fills[code]
                done[slot] = now
                if waiting[slot] >= 0:
                    runnable.append(waiting[slot])
                    waiting[slot] = -1
            else:
                position[rank] = len(order)
            clock[rank] = now
        ends = [t if k == len(order) else NEVER for t, k, order in zip(clock, position, orders, strict=True)]
        return ends, done

    def step_time(self, orders: Sequence[Sequence[int]]) -> float:
        """End of the last action over all ranks; infinite if some rank waits for ever."""
        return max(self.run(orders)[0])

    def peak(self, order: Sequence[int]) -> float:
        """Most activations that one rank holds at once; depends on its order alone, as actions do not overlap."""
        adds, holds, frees = self.adds, self.holds, self.frees
        now = peak = 0.0
        for code in order:
            now += adds[code]
            most = now + holds[code]
            if most > peak:
                peak = most
            now -= frees[code]
        return peak


def _duration(stage: StageCosts, kind: Kind, inline: bool) -> float:
    again = stage.recompute if inline else 0.0
    if kind is F:
        return stage.forward
    if kind is B:
        return stage.input_grad + stage.weight_grad + again
    if kind is I:
        return stage.input_grad + again
    return stage.weight_grad if kind is W else stage.recompute


def _sizes(stage: StageCosts, kind: Kind, inline: bool) -> tuple[float, float, float]:
    """What an action adds at its start, holds while it runs, and frees at its end.

    F keeps what it does not drop, and the stash. R brings the dropped part back; a B with the recompute inside never
    holds more of it than the working set. I leaves what its W needs, which W frees; B frees all.
    """
    kept, split = stage.kept, stage.split_memory
    if kind is F:
        return kept, 0.0, 0.0
    if kind is R:
        return stage.dropped, 0.0, 0.0
    if kind is W:
        return 0.0, 0.0, split.waiting
    found = kept if inline else kept + stage.dropped
    if kind is I:
        return 0.0, (split.working_set if inline else split.growth), found - split.waiting
    return 0.0, (stage.working_set if inline else 0.0), found
