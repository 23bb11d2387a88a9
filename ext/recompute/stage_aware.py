"""Stage-aware recomputation: a memory budget becomes recomputed layers per stage, for the schedule in use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Literal

from ext.core.errors import ConfigError, InfeasibleError
from ext.pipeline.costs import Costs
from ext.pipeline.memory import Load, heaviest_loads, peak
from ext.pipeline.passes import place_recomputes
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import StageModel
from ext.pipeline.timing import OrderCosts
from ext.recompute.policy import POLICIES, FullRecompute, PolicyConfig

ROUNDING = 1 + 1e-9


class BudgetError(InfeasibleError, ConfigError):
    """No choice fits the budget; says what would."""


@dataclass(frozen=True)
class Choice:
    """A schedule and its recomputed layers.

    Attributes:
        schedule: the one asked for, or a variant of it.
        recomputed_layers: by stage.
        step_time: simulated, in the unit of the costs.
        memory: most that each stage holds, what is fixed included, in the unit of the budgets.
    """

    schedule: Schedule
    recomputed_layers: tuple[int, ...]
    step_time: float
    memory: tuple[float, ...]


class ProfiledPolicy(FullRecompute):
    """A policy that decides once the costs of the layers are known; until then everything is recomputed."""

    @abstractmethod
    def choose(
        self,
        schedule: Schedule,
        stages: Sequence[StageModel],
        budgets: Sequence[float],
        show: Callable[[float], str] = "{:.4g}".format,
    ) -> Choice:
        """The recomputed layers of every stage.

        Args:
            schedule: with one stage per rank.
            stages: choices of each stage, by stage.
            budgets: most that each stage may hold, in the unit of the stages' activations.
            show: writes an amount of memory with its unit.

        Raises:
            BudgetError: some stage cannot keep within its budget; names the smallest that it can.
        """


@POLICIES.register("stage_aware")
class StageAware(ProfiledPolicy):
    """Recomputes on each stage as few layers as its budget allows.

    On equal stages that hold nothing else this is Merak's rule (arXiv:2206.04959, section 4.3), rounded up to whole
    layers: a share rho_i = 1 - (1 - rho_0)(p - 1)/(p - 1 - i) of stage i, with rho_0 = 1 - (M - 1)/(p - 1) for a
    budget of M activations, and nothing on the last stage. In general the first stages hold more micro-batches, the
    ends of the model hold embedding and logits, and what fits follows from the order itself.
    """

    class Config(PolicyConfig):
        type: Literal["stage_aware"] = "stage_aware"

    def choose(
        self,
        schedule: Schedule,
        stages: Sequence[StageModel],
        budgets: Sequence[float],
        show: Callable[[float], str] = "{:.4g}".format,
    ) -> Choice:
        outcomes = [_fit(variant, stages, budgets) for variant in schedule.variants()]
        choices = [outcome for outcome in outcomes if isinstance(outcome, Choice)]
        if not choices:
            # Of the variants, that which misses the budgets least.
            needs = [outcome for outcome in outcomes if not isinstance(outcome, Choice)]
            smallest = min(needs, key=lambda need: max(map(truediv, need, budgets)))
            raise BudgetError(*_too_small(schedule, smallest, budgets, show))
        return min(choices, key=lambda choice: choice.step_time)


def _fit(schedule: Schedule, stages: Sequence[StageModel], budgets: Sequence[float]) -> Choice | tuple[float, ...]:
    """The fewest recomputed layers that fit under one order, or the smallest budgets that would do."""
    counts, memory, smallest = [], [], []
    for stage, (model, budget) in enumerate(zip(stages, budgets, strict=True)):
        keeping, recomputing = stage_loads(schedule, stage)
        held = [peak(recomputing if count else keeping, costs) + model.fixed for count, costs in enumerate(model.costs)]
        fits = [count for count, size in enumerate(held) if size <= budget * ROUNDING]
        counts.append(fits[0] if fits else None)
        memory.append(held[fits[0]] if fits else min(held))
        smallest.append(min(held))
    recomputed = tuple(count for count in counts if count is not None)
    if len(recomputed) < len(counts):
        return tuple(smallest)
    costs = Costs(tuple(model.costs[count] for model, count in zip(stages, recomputed, strict=True)))
    return Choice(schedule, recomputed, step_time(schedule, recomputed, costs), tuple(memory))


def stage_loads(schedule: Schedule, stage: int) -> tuple[tuple[Load, ...], tuple[Load, ...]]:
    """The heaviest moments of a stage's rank where it keeps everything, and where it recomputes."""
    rank = schedule.rank_of[stage]
    order, early = schedule.order(rank), schedule.early_recomputes(rank)
    keeping, recomputing = (heaviest_loads(place_recomputes(order, early, stages)) for stages in ((), (stage,)))
    return keeping, recomputing


def step_time(schedule: Schedule, recomputed: Sequence[int], costs: Costs) -> float:
    """Simulated time of a step whose stages recompute so many layers."""
    model = OrderCosts(costs, schedule.rank_of, schedule.shape.num_microbatches)
    recomputing = [stage for stage, count in enumerate(recomputed) if count]
    return model.step_time(
        [
            model.codes.encode(place_recomputes(schedule.order(rank), schedule.early_recomputes(rank), recomputing))
            for rank in range(schedule.shape.num_ranks)
        ]
    )


def _too_small(
    schedule: Schedule, smallest: Sequence[float], budgets: Sequence[float], show: Callable[[float], str]
) -> list[str]:
    name = schedule.config.type
    problems = []
    for stage, (least, budget) in enumerate(zip(smallest, budgets, strict=True)):
        if least > budget * ROUNDING:
            kept = "" if schedule.may_recompute(stage) else f", which '{name}' never recomputes"
            problems.append(f"stage {stage}{kept}: needs at least {show(least)}, the budget is {show(budget)}.")
    return [
        *problems,
        f"Smallest budgets that schedule '{name}' can keep, by stage: {', '.join(map(show, smallest))}. Raise the "
        "budget to these, use more stages, a smaller micro-batch or a schedule that holds fewer micro-batches.",
    ]
