"""The schedule that a file holds."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from ext.core.errors import ConfigError
from ext.pipeline.actions import Action, Kind
from ext.pipeline.costs import Costs
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.plan_file import read_plan
from ext.pipeline.schedule import SCHEDULES, Schedule, ScheduleConfig


@SCHEDULES.register("plan_file")
class PlanFile(Schedule):
    """Runs the plan of a file, as `auto` writes it: orders, recomputed layers and layers of each stage.

    Raises:
        ConfigError: the file holds no plan, or one for other ranks or micro-batches.
    """

    class Config(ScheduleConfig):
        """``path`` of the file, from the folder the run starts in."""

        type: Literal["plan_file"] = "plan_file"
        path: Annotated[str, Field(min_length=1)]

    config: Config
    has_rule = False

    def __init__(
        self, config: ScheduleConfig | None = None, *, shape: PipelineShape, costs: Costs | None = None
    ) -> None:
        super().__init__(config, shape=shape, costs=costs)
        plan = self.plan
        if (plan.num_ranks, plan.num_microbatches) != (shape.num_ranks, shape.num_microbatches):
            raise ConfigError(
                f"the plan in {self.config.path} is for {plan.num_ranks} ranks and {plan.num_microbatches} "
                f"micro-batches, this run has {shape.num_ranks} and {shape.num_microbatches}. Use one made for these."
            )

    @cached_property
    def plan(self) -> Plan:
        """What the file holds."""
        return read_plan(self.config.path)

    @property
    def rank_of(self) -> tuple[int, ...]:
        return self.plan.rank_of

    def order(self, rank: int) -> list[Action]:
        return [action for action in self.plan.compute_order(rank) if action.kind is not Kind.R]

    def actions(self, rank: int, recomputing: Collection[int]) -> list[Action]:
        return [a for a in self.plan.compute_order(rank) if a.kind is not Kind.R or a.stage in recomputing]

    def early_recomputes(self, rank: int) -> frozenset[tuple[int, int]]:
        return frozenset(key for key in self.plan.early_recomputes if self.rank_of[key[0]] == rank)

    def max_in_flight(self, rank: int) -> int:
        return self.shape.num_microbatches * len(self.plan.stages_of(rank))
