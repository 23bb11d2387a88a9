"""Base class and registry of pipeline schedules. A new schedule is one file in schedules/."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from ext.core.errors import ConfigError
from ext.core.model import StrictModel
from ext.core.registry import Registry
from ext.pipeline import placement
from ext.pipeline.actions import Action, W
from ext.pipeline.costs import Costs
from ext.pipeline.passes import place_recomputes
from ext.pipeline.plan import PipelineShape


class ScheduleConfig(StrictModel):
    """Options of a schedule, as written under ``ext.pipeline.schedule``; ``type`` is its name."""

    type: str


class Schedule(ABC):
    """Gives the order of F and B (or I and W) per rank; passes add recomputation and communication.

    Args:
        config: the schedule's own options.
        shape: pipeline ranks and micro-batches.
        costs: times per stage where they are known, for schedules that adapt to them.
    """

    Config: ClassVar[type[ScheduleConfig]]
    recomputes_by_default: ClassVar[bool] = False
    """Whether every layer is recomputed where the user's config has no recompute block."""
    min_microbatches: ClassVar[int] = 1
    has_rule: ClassVar[bool] = True
    """False where a search or a file gives the orders, and not the number of ranks and micro-batches."""

    def __init__(
        self, config: ScheduleConfig | None = None, *, shape: PipelineShape, costs: Costs | None = None
    ) -> None:
        self.config = config if config is not None else self.Config()  # type: ignore[call-arg]
        self.shape = shape
        self.costs = costs
        if shape.num_microbatches < self.min_microbatches:
            raise ConfigError(
                f"schedule '{self.config.type}' needs at least {self.min_microbatches} micro-batches per step, "
                f"gradient_accumulation_steps gives {shape.num_microbatches}. Raise gradient_accumulation_steps "
                f"to {self.min_microbatches} or more, or use the schedule '1f1b'."
            )

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage, by stage."""
        return placement.linear(self.shape.num_ranks)

    @abstractmethod
    def order(self, rank: int) -> list[Action]:
        """F and B (or I and W) of one rank, in order, without recomputation and communication."""

    @abstractmethod
    def max_in_flight(self, rank: int) -> int:
        """Most micro-batches that have run F but not finished B (or W) on ``rank``, over its stages."""

    def variants(self) -> tuple[Schedule, ...]:
        """This schedule and other orders of the same name, for whoever compares them under a memory budget."""
        return (self,)

    def actions(self, rank: int, recomputing: Collection[int]) -> list[Action]:
        """`order` with the R of every early recompute, on the stages that drop something in their forward."""
        return place_recomputes(self.order(rank), self.early_recomputes(rank), recomputing)

    @property
    def splits_backward(self) -> bool:
        """Whether a micro-batch's I and W stand apart."""
        return any(action.kind is W for rank in range(self.shape.num_ranks) for action in self.order(rank))

    @property
    def may_split_backward(self) -> bool:
        """Whether I and W may stand apart in a plan that comes of this schedule."""
        return self.splits_backward

    def early_recomputes(self, rank: int) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) whose R runs before its gradient arrives; all others recompute inside B."""
        return frozenset()

    def may_recompute(self, stage: int) -> bool:
        """False where the schedule's definition keeps all activations of a stage, whatever the policy."""
        return True


SCHEDULES: Registry[Schedule] = Registry("schedule", Schedule, builtins=("ext.pipeline.schedules",))
