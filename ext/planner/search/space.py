"""What a search may choose, and what each choice costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.fit import ROUNDING
from ext.pipeline.layout import LayerCosts
from ext.pipeline.stage_model import StageModel, equal_layers

Models = Callable[[int, int, int], StageModel]
"""The stage on a rank with the layers from a first up to, not including, a last one."""


class Layout(NamedTuple):
    """Layers of each stage, and how many of them are recomputed, by stage: the choice of its `StageModel`."""

    layers: tuple[int, ...]
    recomputed: tuple[int, ...]


class StageNumbers(NamedTuple):
    """A stage as the list scheduler takes it; see `ext.pipeline.costs.StageCosts`.

    Attributes:
        kept: what a forward leaves behind: all that it does not drop, and the stash.
        waiting, growth, split_working_set: of I and W, see `ext.pipeline.costs.SplitMemory`.
        room: what the rank may hold beside what is fixed.
        travel: time of a message between this stage and the next one, either way.
    """

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    kept: float
    dropped: float
    working_set: float
    waiting: float
    growth: float
    split_working_set: float
    room: float
    travel: float


@dataclass(frozen=True)
class Space:
    """A linear pipeline, rank r holding stage r, whose layouts, recomputed layers and orders are open.

    Attributes:
        models: the choices of a stage.
        layers_per_stage: the layout to start from, and the only one where layers stay.
        num_microbatches: per step.
        budgets: most that each rank may hold, by rank, in the unit of the stages' activations; may be infinite.
        latency, bandwidth: of a message between ranks, as in `Costs`.
        moves_layers: whether layers may go to other stages.
        recompute: which layers are recomputed; `open` leaves it to the search, a list by stage needs layers that stay.
        splits_backward: whether weight gradients can wait for an action of their own.
        recomputes_early: whether R may stand as an action of its own.
        num_devices: that all ranks share, as CPU ranks share the cores of a machine; infinite where each has its own.
    """

    models: Models
    layers_per_stage: tuple[int, ...]
    num_microbatches: int
    budgets: tuple[float, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    moves_layers: bool = True
    recompute: Literal["open", "none", "all"] | tuple[int, ...] = "open"
    splits_backward: bool = True
    recomputes_early: bool = True
    num_devices: float = math.inf
    _stages: dict[tuple[int, int, int, int], StageNumbers | None] = field(default_factory=dict, repr=False)

    @property
    def num_ranks(self) -> int:
        return len(self.layers_per_stage)

    def model(self, rank: int, layers: Sequence[int]) -> StageModel:
        """The choices of a rank's stage in a layout."""
        first = sum(layers[:rank])
        return self.models(rank, first, first + layers[rank])

    def most_recomputed(self, layers: Sequence[int]) -> tuple[int, ...]:
        """How many layers of each stage can be recomputed at most."""
        return tuple(len(self.model(rank, layers).costs) - 1 for rank in range(self.num_ranks))

    def fixed_recompute(self, layers: tuple[int, ...]) -> tuple[int, ...] | None:
        """Recomputed layers of each stage where the search has no choice."""
        if self.recompute == "open":
            return None
        if self.recompute == "none":
            return (0,) * self.num_ranks
        return self.most_recomputed(layers) if self.recompute == "all" else self.recompute

    def recomputed_layers(self, layout: Layout) -> tuple[int, ...]:
        """How many layers of each stage recompute something."""
        return tuple(
            self.model(rank, layout.layers).num_recomputed(choice) for rank, choice in enumerate(layout.recomputed)
        )

    def costs(self, layout: Layout) -> Costs:
        """Of all stages, for the simulator."""
        stages = [self.model(rank, layout.layers).costs[count] for rank, count in enumerate(layout.recomputed)]
        return Costs(tuple(stages), self.latency, self.bandwidth)

    def work_time(self, layout: Layout) -> float:
        """The least time in which the devices can do all work of a step; a step of any order takes as long."""
        return 0.0 if self.num_devices == math.inf else self.work_time_of(self.costs(layout).stages)

    def work_time_of(self, stages: Sequence[StageCosts]) -> float:
        """The same for given costs of the stages."""
        work = sum(s.forward + s.recompute + s.input_grad + s.weight_grad for s in stages)
        return self.num_microbatches * work / self.num_devices

    def stages(self, layout: Layout) -> list[StageNumbers] | None:
        """All stages of a layout; None where one cannot recompute so much, or cannot hold a single micro-batch."""
        bounds = list(accumulate(layout.layers, initial=0))
        stages = []
        for rank, count in enumerate(layout.recomputed):
            key = rank, bounds[rank], bounds[rank + 1], count
            if key not in self._stages:
                self._stages[key] = self._numbers(*key)
            stage = self._stages[key]
            if stage is None:
                return None
            stages.append(stage)
        return stages

    def _numbers(self, rank: int, first: int, stop: int, count: int) -> StageNumbers | None:
        model = self.models(rank, first, stop)
        if not 0 <= count < len(model.costs):
            return None
        costs = model.costs[count]
        split = costs.split_memory
        room = self.budgets[rank] * ROUNDING - model.fixed
        if costs.kept + costs.working_set > room:
            return None
        return StageNumbers(
            forward=costs.forward,
            input_grad=costs.input_grad,
            weight_grad=costs.weight_grad,
            recompute=costs.recompute,
            kept=costs.kept,
            dropped=costs.dropped,
            working_set=costs.working_set,
            waiting=split.waiting,
            growth=split.growth,
            split_working_set=split.working_set,
            room=room,
            travel=self.latency + costs.message / self.bandwidth,
        )


def any_layers(layer: LayerCosts) -> Models:
    """Stages of layers that all cost the same."""
    by_count: dict[int, StageModel] = {}

    def model(rank: int, first: int, stop: int) -> StageModel:
        count = stop - first
        if count not in by_count:
            by_count[count] = equal_layers(layer, count)
        return by_count[count]

    return model


def fixed_stages(stages: Sequence[StageModel]) -> Models:
    """Stages whose layers stay where they are."""
    return lambda rank, first, stop: stages[rank]
