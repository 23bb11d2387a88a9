"""The schedule that a search finds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ext.pipeline.schedule import SCHEDULES, ScheduleConfig
from ext.pipeline.schedules.one_f_one_b import OneFOneB


@SCHEDULES.register("auto")
class Auto(OneFOneB):
    """Orders, recomputed layers and, where they may move, layers of every stage, searched for the costs at hand.

    The search (`ext.planner.search`) needs times and sizes. Until it has them, in a run until the first train_batch,
    this is 1f1b with everything recomputed.
    """

    class Config(ScheduleConfig):
        """``search_seconds`` bounds the search, ``seed`` fixes its random choices."""

        type: Literal["auto"] = "auto"
        search_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
        seed: Annotated[int, Field(ge=0)] = 0

    config: Config
    recomputes_by_default = True
    has_rule = False

    @property
    def may_split_backward(self) -> bool:
        return True
