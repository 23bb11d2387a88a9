"""Stage-aware recomputation: a memory budget becomes recomputed layers per stage, for the schedule in use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Literal

from ext.core.errors import ConfigError, InfeasibleError
from ext.pipeline.costs import Costs
from ext.pipeline.fit import ROUNDING, Fit, fewest_recomputed, stage_loads, step_time
from ext.pipeline.schedule import Schedule
from ext.pipeline.stage_model import StageModel
from ext.recompute.policy import POLICIES, PolicyConfig, ProfiledPolicy


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


class LayerPolicy(ProfiledPolicy):
    """Decides how many whole layers each stage recomputes."""

    @abstractmethod
    def choose(
        self,
        schedule: Schedule,
        stages: Sequence[StageModel],
        budgets: Sequence[float],
        show: Callable[[float], str] = "{:.4g}".format,
        latency: float = 0.0,
    ) -> Choice:
        """The recomputed layers of every stage.

        Args:
            schedule: with one stage per rank.
            stages: choices of each stage, by stage.
            budgets: most that each stage may hold, in the unit of the stages' activations.
            show: writes an amount of memory with its unit.
            latency: time of a message between ranks, in the unit of the stages' times.

        Raises:
            BudgetError: some stage cannot keep within its budget; names the smallest that it can.
        """


@POLICIES.register("stage_aware")
class StageAware(LayerPolicy):
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
        latency: float = 0.0,
    ) -> Choice:
        choices = [
            choice
            for variant, fits in _fits(schedule, stages, budgets)
            if (choice := _choice(variant, stages, fits, latency)) is not None
        ]
        if not choices:
            raise BudgetError(*_too_small(schedule, smallest_budgets(schedule, stages, budgets), budgets, show))
        return min(choices, key=lambda choice: choice.step_time)


def smallest_budgets(schedule: Schedule, stages: Sequence[StageModel], budgets: Sequence[float]) -> tuple[float, ...]:
    """By stage, the least that it can be given: under the variant of the schedule that misses the budgets least."""
    needs = [tuple(fit.memory for fit in fits) for _, fits in _fits(schedule, stages, [0.0] * len(budgets))]
    return min(needs, key=lambda need: max(map(truediv, need, budgets)))


def _fits(
    schedule: Schedule, stages: Sequence[StageModel], budgets: Sequence[float]
) -> Iterator[tuple[Schedule, list[Fit]]]:
    for variant in schedule.variants():
        yield (
            variant,
            [
                fewest_recomputed(stage_loads(variant, stage), model, budget)
                for stage, (model, budget) in enumerate(zip(stages, budgets, strict=True))
            ],
        )


def _choice(schedule: Schedule, stages: Sequence[StageModel], fits: Sequence[Fit], latency: float) -> Choice | None:
    """None where some stage does not fit."""
    recomputed = tuple(fit.num_recomputed for fit in fits if fit.num_recomputed is not None)
    if len(recomputed) < len(fits):
        return None
    costs = Costs(tuple(model.costs[count] for model, count in zip(stages, recomputed, strict=True)), latency)
    return Choice(schedule, recomputed, step_time(schedule, recomputed, costs), tuple(fit.memory for fit in fits))


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
