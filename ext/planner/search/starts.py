"""Where a search begins: layouts that balance the stages, for several guesses of what is in flight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ext.pipeline.stage_model import StageModel
from ext.planner.search.list_scheduler import Knobs
from ext.planner.search.space import Layout, Space

FLIGHT_FACTORS = (1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
"""How many times as many micro-batches are taken to be in flight as a pipeline without any wait would need."""

_ROUNDS = 4
_SLOWEST = 3


def plain_knobs(space: Space) -> Knobs:
    """As many forwards as memory allows, one deferred W where there is any, one early R."""
    p = space.num_ranks
    early = int(space.recomputes_early)
    return Knobs((space.num_microbatches,) * p, (int(space.splits_backward),) * p, (early,) * p, (True,) * p)


def starts(space: Space, layouts: Iterable[Layout]) -> Iterator[tuple[Layout, Knobs]]:
    """Some first candidates: the given layouts, everything recomputed, and balanced ones; each once."""
    knobs = plain_knobs(space)
    fixed = space.fixed_recompute(space.layers_per_stage)
    most = space.most_recomputed(space.layers_per_stage) if fixed is None else fixed
    seen = set()
    balanced = (balanced_layout(space, factor) for factor in FLIGHT_FACTORS)
    for layout in (*layouts, Layout(space.layers_per_stage, most), *balanced):
        if layout not in seen:
            seen.add(layout)
            yield layout, knobs


def balanced_layout(space: Space, factor: float) -> Layout:
    """Layers moved, one by one, for as long as that makes the slowest stages faster.

    Args:
        space: what may be chosen.
        factor: see `FLIGHT_FACTORS`.
    """
    layers = space.layers_per_stage
    times, recomputed = _needed(space, layers, factor)
    improves = space.moves_layers
    while improves:
        improves = False
        slowest = sorted(range(space.num_ranks), key=lambda rank: -times[rank])[:_SLOWEST]
        for source, target in ((a, b) for a in slowest for b in range(space.num_ranks) if a != b and layers[a] > 1):
            moved = tuple(count - (rank == source) + (rank == target) for rank, count in enumerate(layers))
            new_times, new_recomputed = _needed(space, moved, factor)
            if sorted(new_times, reverse=True) < sorted(times, reverse=True):
                layers, times, recomputed, improves = moved, new_times, new_recomputed, True
                break
    return Layout(layers, recomputed)


def _needed(space: Space, layers: tuple[int, ...], factor: float) -> tuple[list[float], tuple[int, ...]]:
    """Time of each stage for one micro-batch, and the recomputed layers with which that many fit in flight.

    A micro-batch stays on a rank while it passes all ranks behind and comes back; the rank takes a new one in every
    period of the slowest stage.
    """
    models = [space.model(rank, layers) for rank in range(space.num_ranks)]
    fixed = space.fixed_recompute(layers)
    counts = space.most_recomputed(layers) if fixed is None else fixed
    for _ in range(_ROUNDS):
        costs = [model.costs[min(count, len(model.costs) - 1)] for model, count in zip(models, counts, strict=True)]
        times = [c.forward + c.input_grad + c.weight_grad + c.recompute for c in costs]
        away = 0.0
        needed = []
        for rank in reversed(range(space.num_ranks)):
            flight = min(space.num_microbatches, 1 + math.ceil(factor * away / max(times)))
            needed.append(_fewest(models[rank], space.budgets[rank], flight))
            away += costs[rank].forward + costs[rank].recompute + costs[rank].input_grad
        new = counts if fixed is not None else tuple(reversed(needed))
        if new == counts:
            break
        counts = new
    return times, counts


def _fewest(model: StageModel, budget: float, flight: int) -> int:
    """The fewest recomputed layers with which a rank can hold so many micro-batches; all where none suffice."""
    for count, costs in enumerate(model.costs):
        size = flight * costs.kept + costs.working_set + model.fixed
        if size <= budget:
            return count
    return len(model.costs) - 1
