"""A list scheduler for one pipeline step: at any time each free rank takes the most urgent action that fits.

Backwards come first: I where its weight gradient may wait and memory allows, else a waiting W, else a fused B. Then
forwards, then R and W, which fill the time in between. Every action keeps the rank's memory, counted as
`ext.pipeline.simulate` does. Numbers per rank bend the rules; a search over them finds what no rule of thumb does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ext.pipeline.actions import Action, B, F, I, Kind, R, W
from ext.planner.search.space import StageNumbers

ROUNDING = 1e-9
"""Times closer than this share of the longest forward are the same time."""

_F, _B, _I, _W, _R = range(5)
_BACKWARDS = (_B, _I)
_KINDS: tuple[Kind, ...] = (F, B, I, W, R)


class Knobs(NamedTuple):
    """How each rank bends the rules, by rank.

    Attributes:
        in_flight: most forwards ahead of the backwards.
        deferred: most micro-batches whose W may wait; 0 fuses every backward.
        early: most micro-batches that may be recomputed ahead of their backward.
        recompute_first: whether R goes before a waiting W.
    """

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]
    early: tuple[int, ...]
    recompute_first: tuple[bool, ...]


class Listed(NamedTuple):
    """What the list scheduler made.

    Attributes:
        step_time: end of the last action; infinite where it got stuck or would not end before the limit.
        orders: by rank, pairs of kind and micro-batch; None where the time is infinite.
        num_actions: actions that were placed: the work that it took.
    """

    step_time: float
    orders: list[list[tuple[int, int]]] | None
    num_actions: int


def actions_of(orders: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[Action, ...], ...]:
    """The orders as actions."""
    return tuple(
        tuple(Action(rank, _KINDS[kind], microbatch) for kind, microbatch in order) for rank, order in enumerate(orders)
    )


def shortest_steps(stages: Sequence[StageNumbers], num_microbatches: int, deferred: Sequence[int]) -> list[float]:
    """Bounds from below on the step time, by rank: a step takes so long and as long as the rank idles.

    A rank does all its work; and behind its last input gradient, before which all but the deferred weight gradients
    are done, the ranks before it need time for theirs and the first rank for its last weight gradient.
    """
    bounds = []
    behind = stages[0].weight_grad
    for stage, most in zip(stages, deferred, strict=True):
        once = stage.forward + stage.input_grad + stage.weight_grad + stage.recompute
        work = num_microbatches * once
        left = min(num_microbatches, max(1, most)) * stage.weight_grad
        bounds.append(max(work, work - left + behind) if bounds else work)
        behind += stage.input_grad + stage.travel
    return bounds


def list_schedule(
    stages: Sequence[StageNumbers], num_microbatches: int, knobs: Knobs, limit: float = math.inf
) -> Listed:
    """Schedule one step.

    Args:
        stages: of a linear pipeline, by rank.
        num_microbatches: per step.
        knobs: how each rank bends the rules.
        limit: give up as soon as the step cannot end before.
    """
    m, p, inf = num_microbatches, len(stages), math.inf
    last = p - 1
    epsilon = ROUNDING * max(stage.forward for stage in stages)
    # When inputs and output gradients of each micro-batch arrive; one entry more, that never does.
    inputs = [[inf] * (m + 1) for _ in stages]
    gradients = [[inf] * (m + 1) for _ in stages]
    inputs[0] = [0.0] * m + [inf]
    gradients[last] = [0.0] * m + [inf]
    num_f, num_b, num_r = [0] * p, [0] * p, [0] * p
    held = [0.0] * p
    waiting: list[list[int]] = [[] for _ in stages]
    orders: list[list[tuple[int, int]]] = [[] for _ in stages]
    wake, free = [inf] * p, [0.0] * p
    wake[0] = 0.0
    # How long each rank may idle before the step is longer than the limit.
    idle_left = [limit - bound for bound in shortest_steps(stages, m, knobs.deferred)]
    before = 0.0
    for stage, left in zip(stages, idle_left, strict=True):
        if left <= before:
            return Listed(inf, None, 0)
        before += stage.forward + stage.travel
    travel = [stage.travel for stage in stages]
    most_f, most_w, most_r, r_first = knobs
    num_actions = 0
    while True:
        now = min(wake)
        if now == inf:
            break
        rank = wake.index(now)
        if now > free[rank]:
            idle_left[rank] -= now - free[rank]
            if idle_left[rank] <= 0.0:
                return Listed(inf, None, num_actions)
        by = now + epsilon
        (
            forward, input_grad, weight_grad, recompute, kept, dropped, working, waits, growth, split_working, room, _
        ) = stages[rank]  # fmt: skip
        f, b, mine, queue = num_f[rank], num_b[rank], held[rank], waiting[rank]
        kind = -1
        microbatch = b
        if b < f and gradients[rank][b] <= by:
            early = num_r[rank] > b
            if len(queue) < most_w[rank] and mine + (growth if early else split_working) <= room:
                kind = _I
                queue.append(b)
                if early:
                    end = now + input_grad
                    held[rank] = mine - kept - dropped + waits
                else:
                    end = now + recompute + input_grad
                    held[rank] = mine - kept + waits
            elif queue:
                kind = _W
            elif early:
                kind = _B
                end = now + input_grad + weight_grad
                held[rank] = mine - kept - dropped
            elif mine + working <= room:
                kind = _B
                end = now + recompute + input_grad + weight_grad
                held[rank] = mine - kept
            if kind in _BACKWARDS:
                num_b[rank] = b + 1
                if not early:
                    num_r[rank] = b + 1
                if rank:
                    other = rank - 1
                    gradients[other][b] = arrival = end + travel[other]
                    if arrival < wake[other] and free[other] <= now and num_b[other] == b < num_f[other]:
                        wake[other] = arrival
        can_forward = f - b < most_f[rank] and mine + kept + working <= room
        if kind < 0 and can_forward and inputs[rank][f] <= by:
            kind = _F
            microbatch = f
            end = now + forward
            held[rank] = mine + kept
            num_f[rank] = f + 1
            if rank < last:
                other = rank + 1
                inputs[other][f] = arrival = end + travel[rank]
                if arrival < wake[other] and free[other] <= now and num_f[other] == f:
                    wake[other] = arrival
        if kind < 0:
            r = num_r[rank]
            can_recompute = dropped > 0.0 and r < f and r - b < most_r[rank] and mine + dropped <= room
            if queue and not (can_recompute and r_first[rank]):
                kind = _W
            elif can_recompute:
                kind = _R
                microbatch = r
                end = now + recompute
                held[rank] = mine + dropped
                num_r[rank] = r + 1
            else:
                # Idle until something arrives that can be used.
                arrival = inputs[rank][f] if can_forward else inf
                other_arrival = gradients[rank][b] if b < f else inf
                arrival = arrival if arrival > by else inf
                other_arrival = other_arrival if other_arrival > by else inf
                wake[rank] = arrival if arrival < other_arrival else other_arrival
                free[rank] = now
                continue
        if kind == _W:
            microbatch = queue.pop(0)
            end = now + weight_grad
            held[rank] = mine - waits
        num_actions += 1
        orders[rank].append((kind, microbatch))
        free[rank] = wake[rank] = end
    if sum(num_b) < p * m:
        return Listed(inf, None, num_actions)
    return Listed(max(free), orders, num_actions)
