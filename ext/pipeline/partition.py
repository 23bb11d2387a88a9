"""Which layers go to which stage: by number of blocks, or by time under a memory budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from ext.core.errors import ConfigError, InfeasibleError
from ext.cost.profile import LayerProfile
from ext.cost.states import StateBytes
from ext.pipeline.costs import Costs, StageCosts
from ext.pipeline.fit import ROUNDING, fewest_recomputed, stage_loads, step_time
from ext.pipeline.layout import uniform_layers
from ext.pipeline.passes import MAX_UNFINISHED_SENDS
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import PipelineProfile, Stage, StageModel

Bounds = tuple[int, ...]
"""First layer of each stage, then the number of layers."""


@dataclass(frozen=True)
class Layout:
    """Layers on stages.

    Attributes:
        bounds: first layer of each stage, then the number of layers.
        recomputed_layers: of each stage, as the budget needs.
        bottleneck: time that the slowest stage takes for one micro-batch, recomputation included.
        step_time: simulated.
    """

    bounds: Bounds
    recomputed_layers: tuple[int, ...]
    bottleneck: float
    step_time: float


def uniform_bounds(names: Sequence[str], num_stages: int) -> Bounds:
    """Stages with equally many blocks, as far as they divide; the first stages get the remainder.

    Blocks are the layers of the most frequent class. What stands before the first block goes with the first stage,
    what stands behind the last with the last, and what stands between two with the earlier one. Where no class comes
    up more often than there are stages, every layer counts as a block.

    Args:
        names: class of each layer, in model order.
        num_stages: pipeline stages.

    Raises:
        ConfigError: fewer layers than stages.
    """
    blocks = block_positions(names, num_stages)
    return blocks_to_bounds(uniform_layers(len(blocks), num_stages), blocks, len(names))


def listed_bounds(layers_per_stage: Sequence[int], names: Sequence[str]) -> Bounds:
    """Stages with the given numbers of layers, or, where that is what they sum to, of blocks as in `uniform_bounds`.

    Raises:
        ConfigError: the numbers sum to neither.
    """
    total, num_layers = sum(layers_per_stage), len(names)
    if total == num_layers:
        return tuple(accumulate(layers_per_stage, initial=0))
    blocks = block_positions(names, len(layers_per_stage))
    if total == len(blocks):
        return blocks_to_bounds(layers_per_stage, blocks, num_layers)
    also = f" and {len(blocks)} blocks '{names[blocks[0]]}'" if len(blocks) < num_layers else ""
    raise ConfigError(
        f"{' + '.join(map(str, layers_per_stage))} = {total} layers, the model has {num_layers} layers{also}. Make "
        f"the sum {num_layers}{f' or {len(blocks)}' if also else ''}."
    )


def block_positions(names: Sequence[str], num_stages: int) -> list[int]:
    """Where the blocks of a model are: the layers of its most frequent class."""
    name, count = Counter(names).most_common(1)[0]
    if count < num_stages:
        return list(range(len(names)))
    return [position for position, other in enumerate(names) if other == name]


def blocks_to_bounds(blocks_per_stage: Sequence[int], blocks: Sequence[int], num_layers: int) -> Bounds:
    """Bounds where each stage starts with one of its blocks, and the first with the first layer."""
    starts = list(accumulate(blocks_per_stage, initial=0))[1:-1]
    return (0, *(blocks[start] for start in starts), num_layers)


def recompute_aware(
    schedule: Schedule,
    layers: Sequence[LayerProfile],
    loss: LayerProfile | None,
    states: StateBytes,
    budgets: Sequence[float],
    *,
    allowed: Callable[[int, int], Sequence[int]] = lambda stage, most: range(most + 1),
    max_unfinished_sends: int = MAX_UNFINISHED_SENDS,
    show: Callable[[float], str] = "{:.4g}".format,
) -> Layout:
    """The layout whose slowest stage is fastest, recomputation included, within the memory of every rank.

    A stage recomputes as few layers as its budget allows under the schedule; each of them adds its time. A dynamic
    program over stages and layers finds the smallest bottleneck, exactly; a second one the layout with least time in
    all among those that reach it. Variants of the schedule are compared by simulated step time.

    Args:
        schedule: with one stage per rank.
        layers: of the whole model.
        loss: what the last stage computes behind its layers.
        states: bytes of parameters, gradients and optimizer.
        budgets: bytes that each rank may hold, by stage.
        allowed: numbers of recomputed layers to choose from, fewest first, of a stage and the most that it can have.
        max_unfinished_sends: messages of a channel that are kept until they have left.
        show: writes an amount of memory with its unit.

    Raises:
        ConfigError: fewer layers than stages.
        InfeasibleError: no layout fits the budgets.
    """
    num_stages = len(schedule.rank_of)
    uniform_layers(len(layers), num_stages)
    parts = Parts(layers, loss, num_stages, states, max_unfinished_sends)
    found = [
        layout
        for variant in schedule.variants()
        if (layout := _Search(variant, parts, budgets, allowed).best()) is not None
    ]
    if not found:
        raise InfeasibleError(
            f"no layout of {len(layers)} layers on {num_stages} stages fits budgets of "
            f"{', '.join(map(show, budgets))} per stage under schedule '{schedule.config.type}', with the "
            "recomputation asked for. Raise the budget, use more stages or a smaller micro-batch."
        )
    return min(found, key=lambda layout: layout.step_time)


class Parts:
    """Ranges of a model's layers as stages; equal ranges are looked at once."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        loss: LayerProfile | None,
        num_stages: int,
        states: StateBytes,
        max_unfinished_sends: int = MAX_UNFINISHED_SENDS,
    ) -> None:
        self.layers = tuple(layers)
        self.end = () if loss is None else (loss,)
        self._num_stages = num_stages
        self._states = states
        self._max_unfinished_sends = max_unfinished_sends
        self._models: dict[tuple, StageModel] = {}

    def model(self, first: int, stop: int, *, may_recompute: bool) -> StageModel:
        """All choices of the stage that holds these layers."""
        is_last = stop == len(self.layers)
        layers = self.layers[first:stop] + (self.end if is_last else ())
        key = (is_last, may_recompute, *map(id, layers))
        if key not in self._models:
            # Alone in its pipeline but for the messages, which every stage of several has.
            stage = Stage(layers, is_last=is_last)
            profile = PipelineProfile((stage,) * self._num_stages, self._states, self._max_unfinished_sends)
            self._models[key] = stage.model(profile.fixed(0), may_recompute=may_recompute)
        return self._models[key]


class _Search:
    """The dynamic program under one order."""

    def __init__(
        self,
        schedule: Schedule,
        parts: Parts,
        budgets: Sequence[float],
        allowed: Callable[[int, int], Sequence[int]],
    ) -> None:
        self._schedule = schedule
        self._allowed = allowed
        self._parts = parts
        self._budgets = budgets
        self._num_stages = len(schedule.rank_of)
        self._loads = [stage_loads(schedule, stage) for stage in range(self._num_stages)]
        self._stages: dict[tuple[int, int, int], tuple[float, int, StageModel]] = {}
        # Time without recomputation of all layers before each one.
        self._times = list(accumulate(map(_time, parts.layers), initial=0.0))
        self._times[-1] += sum(map(_time, parts.end))

    def best(self) -> Layout | None:
        """None where nothing fits."""
        total = self._times[-1]
        cap = total / self._num_stages
        bottleneck = math.inf
        while bottleneck == math.inf and cap < 2 * total:
            # Ranges that take longer than the cap even without recomputation are not looked at.
            cap *= 1.2
            bottleneck, _ = self._solve(cap, math.inf, max)
        if bottleneck == math.inf:
            return None
        if bottleneck > cap:
            bottleneck, _ = self._solve(bottleneck, math.inf, max)
        _, bounds = self._solve(bottleneck, bottleneck, add)
        return self._layout(bounds, bottleneck)

    def _solve(self, cap: float, limit: float, join: Callable[[float, float], float]) -> tuple[float, Bounds]:
        """The smallest value of a layout, which joins the times of its stages, and its bounds.

        Args:
            cap: stages that take longer without recomputation are left out.
            limit: stages that take longer with it are left out.
            join: max or add.
        """
        num_layers = len(self._parts.layers)
        reached: dict[int, tuple[float, Bounds]] = {0: (0.0, (0,))}
        for stage in range(self._num_stages):
            left = self._num_stages - stage - 1
            extended: dict[int, tuple[float, Bounds]] = {}
            for first, (value, bounds) in reached.items():
                for stop in range(first + 1, num_layers - left + 1) if left else (num_layers,):
                    if self._times[stop] - self._times[first] > cap * ROUNDING:
                        break
                    time = self._stage(stage, first, stop)[0]
                    joined = join(value, time)
                    if time <= limit and joined < extended.get(stop, (math.inf, ()))[0]:
                        extended[stop] = joined, (*bounds, stop)
            reached = extended
        return reached.get(num_layers, (math.inf, ()))

    def _stage(self, stage: int, first: int, stop: int) -> tuple[float, int, StageModel]:
        """Time of a stage with these layers, infinite where they do not fit; how many it recomputes; its choices."""
        key = stage, first, stop
        if key not in self._stages:
            self._stages[key] = self._fit(stage, first, stop)
        return self._stages[key]

    def _fit(self, stage: int, first: int, stop: int) -> tuple[float, int, StageModel]:
        model = self._parts.model(first, stop, may_recompute=self._schedule.may_recompute(stage))
        allowed = self._allowed(stage, len(model.costs) - 1)
        count = fewest_recomputed(self._loads[stage], model, self._budgets[stage], allowed).num_recomputed
        if count is None:
            return math.inf, 0, model
        return _time(model.costs[count]) + model.costs[count].recompute, count, model

    def _layout(self, bounds: Bounds, bottleneck: float) -> Layout:
        stages = [self._stage(stage, *bounds[stage : stage + 2]) for stage in range(self._num_stages)]
        recomputed = tuple(count for _, count, _ in stages)
        costs = Costs(tuple(model.costs[count] for _, count, model in stages))
        return Layout(bounds, recomputed, bottleneck, step_time(self._schedule, recomputed, costs))


def _time(costs: LayerProfile | StageCosts) -> float:
    return costs.forward + costs.input_grad + costs.weight_grad
