"""A quick table without proof: what stands in when an exact search runs out of time."""

from __future__ import annotations

from collections.abc import Sequence

from ext.recompute.problem import Option, StageProblem
from ext.recompute.reduce import consumers
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.windows import ON_DEMAND


def greedy(problem: StageProblem, options: Sequence[Sequence[Option]]) -> list[Option] | None:
    """Keeps units one by one, most time in the critical path per byte first, as long as memory lasts.

    After every step the windows are filled again in forward order, each unit in the first that has room.

    Returns:
        The option of each unit; None if this way finds nothing that fits, which proves nothing.
    """
    state = _State(problem, options)
    chosen = state.assign(state.forced)
    if chosen is None:
        return None
    kept = set(state.forced)
    while True:
        size = {i: max(1, state.decide[i][KEEP].bytes_for(problem.num_layers)) for i in state.free}
        costs = [option.cost for option in chosen]
        exposed = [i for i in state.free if i not in kept and costs[i] > 0]
        for i in sorted(exposed, key=lambda i: -costs[i] / size[i]):
            trial = state.assign(kept | {i})
            if trial is not None and sum(option.cost for option in trial) < sum(costs):
                chosen = trial
                kept.add(i)
                break
        else:
            return chosen


class _State:
    def __init__(self, problem: StageProblem, options: Sequence[Sequence[Option]]) -> None:
        self.problem, self.readers = problem, consumers(problem)
        self.decide = [{option.decision: option for option in group} for group in options]
        # What cannot be recomputed on demand is kept from the start; so are regions, all of them alike.
        units = problem.layer.units
        regions = {i for i, unit in enumerate(units) if unit.region}
        for i in sorted(regions, reverse=True):
            while units[i].view_of:  # a view is kept with what it is a view of
                i = problem.index[units[i].view_of]
                regions.add(i)
        self.forced = regions | {i for i, group in enumerate(self.decide) if ON_DEMAND not in group and KEEP in group}
        self.free = [i for i, group in enumerate(self.decide) if i not in self.forced and KEEP in group]
        self.room = problem.budget - problem.input_bytes

    def assign(self, kept: set[int]) -> list[Option] | None:
        """Windows for what is not kept; None if the memory does not suffice."""
        problem, units = self.problem, self.problem.layer.units
        bases = {u.name: i for i, u in enumerate(units)}
        kept = {i for i in kept if not units[i].view_of or bases[units[i].view_of] in kept}
        recomputed: set[int] = set()
        for i in reversed(range(len(units))):
            wanted = units[i].needed or any(j in recomputed for j in self.readers[i])
            if wanted and i not in kept:
                recomputed.add(i)
        chosen = [
            self.decide[i][KEEP]
            if i in kept
            else self.decide[i].get(ON_DEMAND)
            if i in recomputed
            else self.decide[i].get(UNUSED)
            for i in range(len(units))
        ]
        if any(option is None for option in chosen):
            return None
        result = [option for option in chosen if option is not None]
        total = sum(option.bytes_for(problem.num_layers) for option in result)
        if total > self.room:
            return None
        left = {window.name: window.capacity for window in problem.windows}
        for i in sorted(recomputed):
            inputs = [result[problem.index[name]] for name in units[i].inputs]
            readers = [result[j] for j in self.readers[i] if j in recomputed]
            windows = sorted((o for o in self.decide[i].values() if o.decision in left), key=lambda o: o.position)
            for option in windows:
                more = option.bytes_for(problem.num_layers) - result[i].bytes_for(problem.num_layers)
                fits = option.time <= left[option.decision] and total + more <= self.room
                in_order = all(v.serves(option) for v in inputs) and all(option.serves(reader) for reader in readers)
                if in_order and fits and option.cost < result[i].cost:
                    left[option.decision] -= option.time
                    total += more
                    result[i] = option
                    break
        return result
