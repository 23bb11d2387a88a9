"""The memory of a DeepSpeed pipeline: profiled before the first step, counted in it, explained where it is too much.

All of it happens in the first training step and only where somebody asks: a recompute policy or a budget that needs
it, or the environment variable EXT_MEMORY_REPORT=1 on the rank 0. Later steps run without any of it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ext.adapters.deepspeed import resolve
from ext.adapters.deepspeed.devices import num_shared_devices
from ext.adapters.deepspeed.profiling import profile_stages
from ext.adapters.deepspeed.states import optimizer_tensors, predicted_states, state_tensors
from ext.config import budget
from ext.config.decide import budgets_in_bytes, decides_about_units, needs_profile
from ext.config.unit_costs import known_units, measures_units
from ext.core.errors import OutOfMemoryError
from ext.pipeline.memory_table import StageMemory, predict, table
from ext.pipeline.stage_model import PipelineProfile, Stage
from ext.recompute.advice import nearest_change
from ext.recompute.pipeline_tables import UnitCostsOfStages
from ext.runtime.live_bytes import CountsOneStep, LiveBytes, storage_bytes
from ext.runtime.memory_story import is_out_of_memory, most_seen, story
from ext.runtime.messages import as_tuple
from ext.runtime.profile import ReplayedIterator

logger = logging.getLogger(__name__)


class MemoryWatch(CountsOneStep):
    """What the stages of a pipeline hold.

    Args:
        engine: of this rank; every rank of the world makes one. Collective over the world.

    Attributes:
        profile: of all stages; None before the first step, and where nobody asked.
        units: costs of their layers' units, where the recompute policy decides about these.
        rows: memory of all stages, predicted, and measured once the first step is done; empty without a profile.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        asked = [budget.is_report_asked(os.environ)]
        dist.broadcast_object_list(asked, src=0)
        self._shows = asked[0]
        self._is_due = asked[0] or needs_profile(engine.ext_config)
        self._device: Any = get_accelerator()
        self._on_cpu = self._device.device_name() == "cpu"
        self._was_counted = False
        self._most = 0
        self.profile: PipelineProfile | None = None
        self.units: UnitCostsOfStages | None = None
        self.rows: list[StageMemory] = []

    # -- before the first step -----------------------------------------------------------------------------

    def before_step(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        """In the first step: profile, decide, predict, start counting. Collective over the world.

        Returns:
            What the step takes its micro-batches from: all that ``data_iter`` would have given.

        Raises:
            ConfigError: on every rank: no choice keeps the budget.
        """
        engine = self._engine
        if self._is_due:
            given = engine.data_iterator if data_iter is None else data_iter
            # Stages between the first and the last may have no data of their own, and measure all the same.
            replayed = self.profile_with(iter(()) if given is None else given)
            if data_iter is not None:
                data_iter = replayed
            elif given is not None:
                engine.data_iterator = replayed
        if self.profile is not None and not self._was_counted:
            self._was_counted = True
            self._counter = LiveBytes([*engine.module.parameters(), *engine.module.buffers()], self._buffers)
            if not self._on_cpu:
                self._device.reset_peak_memory_stats()
        return data_iter

    def decide_from(self, sample_batch: Any) -> None:
        """Do now, with the user's micro-batch, what the first step would do with its own. Collective over the world."""
        if self._is_due:
            self.profile_with(iter([sample_batch]))

    def profile_with(self, microbatches: Iterator[Any]) -> Iterator[Any]:
        """Profile the stages on the first of these micro-batches and have the engine run what that decides.

        Collective over the world.

        Returns:
            The same micro-batches from the start.
        """
        engine = self._engine
        self._is_due = False
        replayed = ReplayedIterator(microbatches)
        kept, engine.data_iterator = engine.data_iterator, replayed
        try:
            measured = profile_stages(
                engine,
                with_units=measures_units(engine.ext_config),
                with_deferral=engine.resolution.schedule.may_split_backward,
            )
        finally:
            engine.data_iterator = kept
        layers = measured.layers
        if decides_about_units(engine.ext_config):
            about = {"device": self._device.device_name(), "torch": str(torch.__version__)}
            known = partial(known_units, engine.ext_config, layers, measured.units, about)
            self.units = engine.guard.from_rank_0(known)
        last = len(layers) - 1
        self.profile = PipelineProfile(
            tuple(Stage(stage, is_last=index == last) for index, stage in enumerate(layers)),
            predicted_states(engine),
            num_devices=num_shared_devices(engine.num_stages),
        )
        engine.resolve_again()
        self._check_budgets()
        if engine.global_rank == 0:
            resolve.write_resolved(engine.ext_config, engine.resolution)
        self._announce("predicted " + table(self.rows))
        return replayed.again()

    def predict(self) -> None:
        """Bring the rows up to date with the engine's plan."""
        if self.profile is not None:
            tables = self._engine.resolution.tables
            costs = None if tables is None else tables.costs
            self.rows = predict(self._engine.plan, self.profile, self.budgets(), costs)

    def budgets(self) -> list[int] | None:
        """Bytes that the rank of each stage may hold."""
        device_bytes = None if self._on_cpu else self._device.total_memory()
        return budgets_in_bytes(self._engine.ext_config, self._engine.num_stages, device_bytes)

    def _check_budgets(self) -> None:
        """A budget is kept under every policy, or nothing runs."""
        budget.check_budgets(self._engine.ext_config, self.rows, self._engine.resolution.policy, self._change)

    # -- in the first step ---------------------------------------------------------------------------------

    def counting(self) -> AbstractContextManager[None]:
        """Around the step's actions."""
        return nullcontext() if self._counter is None else self._counter.saved()

    def count_states(self) -> None:
        """Between the last backward and the optimizer's step, when all gradients are there."""
        if self._counter is not None:
            self._most = max(self._most, self._counter.peak + self._states_now())

    def count_passing_gradients(self) -> None:
        """In a split backward, where gradients may be there that will have gone by the end of W."""
        if self._counter is not None and self._engine.using_bf16_optimizer:
            self._most = max(self._most, self._counter.total + self._states_now())

    def _states_now(self) -> int:
        """Bytes of all states but what the optimizer makes in its first step."""
        return storage_bytes(state_tensors(self._engine)) - storage_bytes(optimizer_tensors(self._engine))

    def _buffers(self) -> Iterator[Tensor]:
        """What the engine itself holds for the micro-batches in flight; the loss takes the last outputs at once."""
        for name in ("inputs",) if self._engine.is_last_stage() else ("inputs", "outputs"):
            for held in self._engine.pipe_buffers[name]:
                if held is not None:
                    yield from as_tuple(held)

    # -- after the first step ------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Show predicted and measured memory side by side. Collective over a pipeline, in the first step.

        Raises:
            OutOfMemoryError: on every rank of the pipeline: a stage held more than its budget.
        """
        if self._counter is None:
            return
        live = self._most + storage_bytes(optimizer_tensors(self._engine))
        self._counter = None
        mine = self._engine.stage_id, live, None if self._on_cpu else self._device.max_memory_allocated()
        pipeline: list[Any] = [None] * self._engine.num_stages
        dist.all_gather_object(pipeline, mine, group=self._engine.grid.get_pipe_parallel_group())
        for stage, measured, allocated in pipeline:
            self.rows[stage] = replace(self.rows[stage], measured=measured, allocated=allocated)
        self._announce("measured " + table(self.rows))
        over = [
            row for row in self.rows if budget.is_given(self._engine.ext_config) and most_seen(row) > (row.budget or 0)
        ]
        guard = self._engine.guard
        guard.start_step()
        guard.agree(OutOfMemoryError(self._story(over[0], "held more than its budget")) if over else None)

    def abandon(self) -> None:
        """A failed step is not counted."""
        self._counter = None

    def explained(self, error: BaseException) -> BaseException:
        """The error, or, where a device or host ran out of memory, one that says where and what would fit."""
        if not is_out_of_memory(error):
            return error
        stage = self._engine.stage_id
        if not self.rows:
            return OutOfMemoryError(
                f"stage {stage} ran out of memory: {error}\nThere is no prediction; set {budget.REPORT_SWITCH}=1 "
                "to get one per stage, or let ext.recompute.policy 'stage_aware' choose what fits."
            )
        row = self.rows[stage]
        if self._counter is not None:
            states = storage_bytes(state_tensors(self._engine))
            row = replace(row, measured=max(self._counter.peak, self._counter.now) + states)
        if not self._on_cpu:
            row = replace(row, allocated=self._device.max_memory_allocated())
        return OutOfMemoryError(f"{self._story(row, 'ran out of memory')}\n{error}")

    def _story(self, row: StageMemory, what: str) -> str:
        return story(row, what, self._change(row))

    def _change(self, row: StageMemory) -> str:
        """The nearest change that fits; where more was measured than predicted, with room for the difference."""
        budgets = self.budgets()
        if self.profile is None or budgets is None:
            return "Recompute more layers, or take a smaller micro-batch."
        excess = max(0, most_seen(row) - row.total)
        return nearest_change(
            self._engine.resolution.schedule, self.profile, [max(1, given - excess) for given in budgets]
        )

    def _announce(self, text: str) -> None:
        if self._engine.global_rank != 0:
            return
        if self._shows and not logger.isEnabledFor(logging.INFO):
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - asked for by the switch
        else:
            logger.info("%s", text)
