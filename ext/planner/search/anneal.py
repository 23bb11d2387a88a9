"""Simulated annealing over layouts, recomputed layers and the knobs of the list scheduler.

Bounded by work, so that the same seed finds the same on any machine that is fast enough, and by the clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ext.planner.search.list_scheduler import Knobs, list_schedule
from ext.planner.search.space import Layout, Space

StoppedBy = Literal["work", "clock", "interrupt"]

FIRST_TEMPERATURE = 0.005
LAST_TEMPERATURE = 0.0005
"""Shares of the best step time that a worse candidate may be worse by, about, at the start and at the end."""
COOLING = 1.5
PHASES = ((0.25, 4), (0.5, 2), (1.0, 1))
"""Until which share of the work how many walks, the best so far, go on."""
MAX_DEFERRED, MAX_EARLY = 4, 3

_CLOCK_EVERY = 16


class Candidate(NamedTuple):
    """One choice of everything."""

    layout: Layout
    knobs: Knobs


@dataclass
class _Chain:
    """Where one of several parallel walks is."""

    candidate: Candidate
    step_time: float


class Found(NamedTuple):
    """The best candidate.

    Attributes:
        candidate: None where nothing fits.
        step_time: as the list scheduler times it.
        num_evaluations: candidates looked at.
        stopped_by: the planned amount of work, the clock, or Ctrl-C.
    """

    candidate: Candidate | None
    step_time: float
    num_evaluations: int
    stopped_by: StoppedBy


class Annealer:
    """One search.

    Args:
        space: what may be chosen.
        seed: of all random choices.
        max_actions: work to do: actions to schedule, over all candidates.
        deadline: of `time.monotonic`, at which the search ends whatever it has done.
        on_progress: called now and then with the share of the work that is done and the best time.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        max_actions: int,
        deadline: float,
        on_progress: Callable[[float, float], None] | None = None,
    ) -> None:
        self._space = space
        self._random = random.Random(seed)
        self._max_actions = max_actions
        self._deadline = deadline
        self._on_progress = on_progress
        self._num_actions = 0
        self._num_evaluations = 0
        self._best: tuple[float, Candidate | None] = (math.inf, None)

    def run(self, starts: Iterable[Candidate]) -> Found:
        """Try the starts, anneal from the best of them; Ctrl-C ends it with the best so far."""
        stopped_by: StoppedBy = "interrupt"
        try:
            chains: list[_Chain] = []
            for candidate in starts:
                chains.append(_Chain(candidate, self._time(candidate, math.inf)))
                self._take(candidate, chains[-1].step_time)
                if self._best[1] is not None and time.monotonic() > self._deadline:
                    break
            stopped_by = self._anneal(chains)
        except KeyboardInterrupt:
            pass
        step_time, best = self._best
        return Found(best, step_time, self._num_evaluations, stopped_by)

    def _anneal(self, chains: list[_Chain]) -> StoppedBy:
        chains = [chain for chain in chains if chain.step_time < math.inf]
        for share, num_chains in PHASES:
            chains = sorted(chains, key=lambda chain: chain.step_time)[:num_chains]
            until = share * self._max_actions
            while chains and self._num_actions < until:
                for chain in chains:
                    self._step(chain)
                if time.monotonic() > self._deadline:
                    return "clock"
                if self._on_progress is not None:
                    self._on_progress(self._num_actions / self._max_actions, self._best[0])
        return "work"

    def _step(self, chain: _Chain) -> None:
        for _ in range(_CLOCK_EVERY):
            done = min(1.0, self._num_actions / self._max_actions)
            temperature = max(LAST_TEMPERATURE, FIRST_TEMPERATURE * (1.0 - done) ** COOLING) * self._best[0]
            candidate = self._neighbour(chain.candidate)
            limit = chain.step_time - temperature * math.log(1.0 - self._random.random())
            step_time = self._time(candidate, limit)
            if step_time < limit:
                chain.candidate, chain.step_time = candidate, step_time
                self._take(candidate, step_time)

    def _take(self, candidate: Candidate, step_time: float) -> None:
        if step_time < self._best[0] * (1.0 - 1e-9):
            self._best = step_time, candidate

    def _time(self, candidate: Candidate, limit: float) -> float:
        """Step time of a candidate; infinite where it does not fit or would not end before the limit."""
        self._num_evaluations += 1
        self._num_actions += self._space.num_ranks  # what a look at the stages alone costs, about
        stages = self._space.stages(candidate.layout)
        work_time = math.inf if stages is None else self._space.work_time(candidate.layout)
        if stages is None or work_time >= limit:
            return math.inf
        listed = list_schedule(stages, self._space.num_microbatches, candidate.knobs, limit)
        self._num_actions += listed.num_actions
        return max(listed.step_time, work_time)

    def _neighbour(self, candidate: Candidate) -> Candidate:
        """The candidate with one to three small changes."""
        changed = candidate
        while changed == candidate:
            for _ in range(self._random.choice((1, 1, 1, 2, 2, 3))):
                changed = self._change(changed)
        return changed

    def _change(self, candidate: Candidate) -> Candidate:
        pick = self._random.random()
        rank = self._random.randrange(self._space.num_ranks)
        (layers, recomputed), knobs = candidate
        if pick < 0.3 and self._space.moves_layers:
            return Candidate(self._move_layer(layers, recomputed, rank), knobs)
        if pick < 0.6 and self._space.recompute == "open":
            most = layers[rank] if self._space.moves_layers else len(self._space.model(rank, layers).costs) - 1
            count = max(0, min(most, recomputed[rank] + self._random.choice((-1, 1))))
            return Candidate(Layout(layers, _with(recomputed, rank, count)), knobs)
        return Candidate(candidate.layout, self._turn_knob(knobs, rank))

    def _move_layer(self, layers: tuple[int, ...], recomputed: tuple[int, ...], source: int) -> Layout:
        """One layer of a rank to another; half of the time its recomputation goes with it."""
        target = self._random.randrange(self._space.num_ranks)
        if target == source or layers[source] == 1:
            return Layout(layers, recomputed)
        moved = _with(_with(layers, source, layers[source] - 1), target, layers[target] + 1)
        fixed = self._space.fixed_recompute(moved)
        if fixed is not None:
            return Layout(moved, fixed)
        if self._random.random() < 0.5:
            recomputed = _with(_with(recomputed, source, recomputed[source] - 1), target, recomputed[target] + 1)
        limited = (max(0, min(count, most)) for count, most in zip(recomputed, moved, strict=True))
        return Layout(moved, tuple(limited))

    def _turn_knob(self, knobs: Knobs, rank: int) -> Knobs:
        m, behind = self._space.num_microbatches, self._space.num_ranks - rank
        step = self._random.choice((-1, 1))
        pick = self._random.random()
        if pick < 0.38:
            now = knobs.in_flight[rank]
            chosen = self._random.choice((now - 1, now + 1, m, behind, behind + 1, behind + 2))
            return knobs._replace(in_flight=_with(knobs.in_flight, rank, max(1, min(m, chosen))))
        if pick < 0.68:
            most = MAX_DEFERRED if self._space.splits_backward else 0
            chosen = max(0, min(most, knobs.deferred[rank] + step))
            return knobs._replace(deferred=_with(knobs.deferred, rank, chosen))
        if pick < 0.88:
            most = MAX_EARLY if self._space.recomputes_early else 0
            chosen = max(0, min(most, knobs.early[rank] + step))
            return knobs._replace(early=_with(knobs.early, rank, chosen))
        return knobs._replace(recompute_first=_with(knobs.recompute_first, rank, not knobs.recompute_first[rank]))


def _with(values: tuple, index: int, value: int | bool) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
