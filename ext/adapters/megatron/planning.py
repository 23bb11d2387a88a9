"""The plans of one model: made in its first training step, anew for another number of micro-batches."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ext.adapters.megatron import arguments, check, limits, resolve
from ext.adapters.megatron.layers import MegatronRngTracker, transformer_layers
from ext.adapters.megatron.linear import make_deferrable, undeferrable_layers
from ext.adapters.megatron.profiling import Measured, profile_stage
from ext.adapters.megatron.states import ADAM_MOMENTS, state_bytes
from ext.adapters.megatron.step import Call
from ext.config import ExtConfig, resolved
from ext.config.budget import REPORT_SWITCH, check_budgets, is_report_asked
from ext.config.decide import (
    Decision,
    budgets_in_bytes,
    decides_about_units,
    decides_by_search,
    make_schedule,
    needs_profile,
    reads_plan_file,
)
from ext.config.unit_costs import known_units, measures_units
from ext.core.errors import ConfigError
from ext.pipeline.memory_table import StageMemory, predict, table
from ext.pipeline.plan import PipelineShape
from ext.pipeline.stage_model import PipelineProfile, Stage
from ext.recompute.advice import nearest_change
from ext.recompute.pipeline_tables import UnitCostsOfStages
from ext.recompute.stage_units import StageUnits
from ext.runtime.channels import Links
from ext.runtime.guard import FailureGuard
from ext.runtime.profile import shared_profiles

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Plans:
    """What the config means for a model, by number of micro-batches.

    Collective over the world, as are its methods.

    Args:
        config: the user's.
        name: how a dotted key is called in errors.
        model: chunk of this rank.
        host_config: its ``TransformerConfig``.
        groups: of this rank.
        moments: see `state_bytes`.

    Attributes:
        layers_per_stage: transformer layers of every stage, as they were built.
        rows: memory of every stage under the newest plan, predicted, and measured once a step was counted; empty
            without a profile.
        note: told of every tensor that a unit keeps or brings back.
    """

    def __init__(
        self,
        config: ExtConfig,
        name: Callable[[str], str],
        model: nn.Module,
        host_config: Any,
        groups: Any,
        moments: int = ADAM_MOMENTS,
    ) -> None:
        self.guard = FailureGuard()
        self.layers_per_stage = _count_layers(model, host_config, groups)
        self.rows: list[StageMemory] = []
        self.note: Callable[[Tensor], Any] | None = None
        self.config = config
        self._name = name
        check.raise_if_any([*check.wrong_budgets(config, len(self.layers_per_stage), name)])
        self._model = model
        self._host_config = host_config
        self._group = groups.pp
        self._stage = dist.get_group_rank(groups.pp, dist.get_rank())
        self._states = state_bytes(model, host_config, groups.dp_cp.size(), moments)
        self._profile: PipelineProfile | None = None
        self._units: UnitCostsOfStages | None = None
        self._decisions: dict[int, Decision] = {}
        self._shows_memory = self.guard.from_rank_0(lambda: is_report_asked(os.environ) and self._can_report())

    @property
    def needs_profile(self) -> bool:
        """Whether the next training step has to be profiled first."""
        return self._profile is None and (self._shows_memory or needs_profile(self.config))

    def _can_report(self) -> bool:
        """Whether a prediction would be true; where not, says so."""
        obstacles = limits.problems(self._host_config, self._name, splits=False, recomputes=limits.RECOMPUTE)
        if obstacles:
            logger.warning("%s: the memory of these settings cannot be predicted: %s", REPORT_SWITCH, obstacles)
        return not obstacles

    @property
    def newest(self) -> Decision | None:
        """What was decided last."""
        return next(reversed(self._decisions.values()), None)

    def measure(self, call: Call, links: Links) -> Measured:
        """This rank's stage, on the next micro-batch. Collective over the pipeline."""
        stage, num_stages = self._stage, len(self.layers_per_stage)
        layers, with_units = transformer_layers(self._model), measures_units(self.config)
        with_deferral = self._may_split(PipelineShape(num_stages, call.num_microbatches))
        if with_deferral:
            make_deferrable(self._model)
        return profile_stage(call, stage, num_stages, links, layers, with_units=with_units, with_deferral=with_deferral)

    def take(self, measured: Measured) -> None:
        """From here on plans are made for what the pipeline of global rank 0 measured."""
        layers = shared_profiles(measured.layers, self._stage, self._group)
        if decides_about_units(self.config):
            units = shared_profiles(measured.units, self._stage, self._group)
            about = {"device": "cuda" if torch.cuda.is_available() else "cpu", "torch": str(torch.__version__)}
            known = partial(known_units, self.config, layers, units, about)
            self._units = self.as_typed(lambda: self.guard.from_rank_0(known))
        last = len(layers) - 1
        stages = [Stage(stage, is_last=i == last, copies_inputs=False) for i, stage in enumerate(layers)]
        self._profile = PipelineProfile(tuple(stages), self._states)

    def of(self, num_microbatches: int) -> Decision:
        """The plan for a training step.

        Raises:
            ConfigError: on every rank: schedule, policy, budget and model do not fit.
        """
        if num_microbatches not in self._decisions:
            self._decisions[num_microbatches] = self.as_typed(partial(self._decide, num_microbatches))
        return self._decisions[num_microbatches]

    def units_of(self, num_microbatches: int, stage: int) -> StageUnits | None:
        """A stage's part of what a unit policy decided for a training step, at work; None where none did."""
        tables = self.of(num_microbatches).tables
        if tables is None:
            return None
        return StageUnits(tables.stages[stage], (MegatronRngTracker(),), tables.reserves[stage], self.note)

    def _decide(self, num_microbatches: int) -> Decision:
        budgets = budgets_in_bytes(self.config, len(self.layers_per_stage), _device_bytes())
        searches = decides_by_search(self.config)
        decide = partial(
            resolve.resolve,
            self.config,
            self.layers_per_stage,
            num_microbatches,
            self._profile,
            budgets,
            self._units,
            splits_backward=searches and self._can_split(),
        )
        by_one = searches or reads_plan_file(self.config)
        decision = self.guard.from_rank_0(decide) if by_one else decide()
        self._refuse_settings(decision)
        if self._profile is not None:
            tables = decision.tables
            self.rows = predict(decision.plan, self._profile, budgets, None if tables is None else tables.costs)
            check_budgets(self.config, self.rows, decision.policy, partial(self._change, decision, budgets))
        if decision.plan.split_backwards:
            make_deferrable(self._model)
        self._announce(decision)
        return decision

    def _refuse_settings(self, decision: Decision) -> None:
        """Settings of Megatron's that cannot go with the plan."""
        splits = bool(decision.plan.split_backwards)
        recomputes = limits.recomputing_key(self.config.recompute is not None, any(decision.plan.recomputed_layers))
        problems = limits.problems(self._host_config, self._name, splits=splits, recomputes=recomputes)
        if splits:
            problems += limits.layers_that_cannot_split(undeferrable_layers(self._model), self._name)
        self.guard.start_step()
        self.guard.agree(ConfigError(*problems) if problems else None)

    def _can_split(self) -> bool:
        """Whether no rank has something that keeps weight gradients from waiting."""
        everyone: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(everyone, not self._obstacles_to_split())
        return all(everyone)

    def _may_split(self, shape: PipelineShape) -> bool:
        """Whether a plan may let this rank's weight gradients wait."""
        may = reads_plan_file(self.config) or make_schedule(self.config, shape).may_split_backward
        return may and not self._obstacles_to_split()

    def _obstacles_to_split(self) -> list[Any]:
        return [*limits.against_split(self._host_config, self._name), *undeferrable_layers(self._model)]

    def _change(self, decision: Decision, budgets: Sequence[int] | None, row: StageMemory) -> str:
        assert self._profile is not None
        assert budgets is not None
        return nearest_change(decision.schedule, self._profile, budgets, moves_layers=False)

    def nearest_change(self, excess: int) -> str:
        """The nearest change of the newest plan that fits, with room for bytes beyond the prediction."""
        budgets = budgets_in_bytes(self.config, len(self.layers_per_stage), _device_bytes())
        if self._profile is None or budgets is None or self.newest is None:
            return "Recompute more layers, or take a smaller micro-batch."
        return self._typed(self._change(self.newest, [max(1, given - excess) for given in budgets], self.rows[0]))

    def show_rows(self, what: str) -> None:
        """Rank 0 tells the memory of every stage, where somebody asked."""
        if dist.get_rank() != 0:
            return
        if self._shows_memory:
            print(f"{what} {table(self.rows)}", file=sys.stderr, flush=True)  # noqa: T201 - asked for by the switch
        else:
            logger.info("%s %s", what, table(self.rows))

    def _announce(self, decision: Decision) -> None:
        """Rank 0 writes what is active beside the run and, the first time, prints the promised line."""
        versions = {"megatron-core": version("megatron-core"), "torch": torch.__version__}
        self.guard.from_rank_0(lambda: str(resolved.write_resolved(self.config, decision, versions)))
        if dist.get_rank() != 0:
            return
        if self.rows:
            self.show_rows("predicted")
        if decision.chosen is not None:
            logger.info("auto: %s; ended by %s", decision.chosen.reason, decision.chosen.stopped_by)
        if not self._decisions:
            line = resolved.summary(f"megatron-core {versions['megatron-core']}", decision)
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - the promised line

    def as_typed(self, make: Callable[[], T]) -> T:
        """What ``make()`` gives; keys in its errors are called as the user wrote them."""
        try:
            return make()
        except ConfigError as error:
            raise type(error)(*map(self._typed, error.problems)) from error

    def _typed(self, text: str) -> str:
        """A text whose keys are called as the user wrote them."""
        keys = "|".join(re.escape(flag.path) for flag in arguments.flags())
        return re.sub(rf"\bext\.({keys})\b", lambda key: self._name(key[1]), text)


def _count_layers(model: nn.Module, host_config: Any, groups: Any) -> list[int]:
    """Transformer layers of every stage, as they were built.

    Raises:
        ConfigError: they are not as many as the host's config names.
    """
    counts: list[int] = [0] * groups.pp.size()
    dist.all_gather_object(counts, len(transformer_layers(model)), group=groups.pp)
    if sum(counts) != host_config.num_layers:
        raise ConfigError(
            f"--num-layers: {host_config.num_layers} layers asked, {counts} were built on {len(counts)} stages, "
            f"{sum(counts)} in all. Give the stages their layers by --pipeline-model-parallel-layout or "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers."
        )
    return counts


def _device_bytes() -> int | None:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if _on_cuda() else None


def _on_cuda() -> bool:
    return torch.cuda.is_available()
