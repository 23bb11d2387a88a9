"""A PipelineEngine that runs plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from ext.adapters.deepspeed import instructions, resolve
from ext.adapters.deepspeed.communication import ChannelPipelineEngine
from ext.adapters.deepspeed.compute import ComputingPipelineEngine
from ext.adapters.deepspeed.layers import LayerInventory
from ext.adapters.deepspeed.memory import MemoryWatch
from ext.adapters.deepspeed.rng import DeepSpeedRngTracker
from ext.adapters.deepspeed.tracing import Tracer
from ext.config import ExtConfig
from ext.config.decide import decides_by_search
from ext.config.sub_pipeline import plan_problem
from ext.core.errors import ConfigError
from ext.pipeline.actions import Action, Kind
from ext.pipeline.build import forward_plan
from ext.recompute import stage_report
from ext.recompute.stage_report import StageRecompute, stage_recompute
from ext.recompute.stage_units import StageUnits
from ext.runtime.guard import FailureGuard
from ext.runtime.recorder import Recorder, clock_for
from ext.runtime.split_backward import WeightGradQueue
from ext.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)


def _recorded(kind: Kind, handler: Callable[..., None]) -> Callable[..., None]:
    """The handler of a kind of action, as an instruction's."""

    def run(engine: PlanPipelineEngine, stage: int, microbatch: int) -> None:
        name = str(Action(stage, kind, microbatch))
        with engine.watchdog.action(name), engine.recorder.action(kind, stage, microbatch):
            handler(engine, stage, microbatch)

    return run


class PlanPipelineEngine(ComputingPipelineEngine):
    """Runs a plan through DeepSpeed's own schedule loop and instruction map.

    Buffers are indexed by micro-batch. Losses, gradients of the outputs and dropped layers are kept per
    micro-batch, where the host has one slot for all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Activations travel whole: the host's partitioned form has one gradient slot for all micro-batches.
        self.is_pipe_partitioned = self.is_grad_partitioned = False
        self._count_all_stages_in_clip_norm()
        config = ExtConfig.from_ds_config(kwargs["config_class"]._param_dict)
        assert config is not None, "the engine is chosen only where the config has an active 'ext' block"
        self.ext_config = config
        self.inventory = LayerInventory.of(self.module)
        self.pipe_buffers.update(losses=[], regions=[], output_specs=[])
        self.recomputes: dict[int, int] = {}
        self.resolution = resolve.resolve(config, self.inventory, self.micro_batches)
        if self.resolution.replaces_host_checkpointing:
            self.module.activation_checkpoint_interval = 0
        self.plan = self.resolution.plan
        self._refuse_recompute_of_parts()
        self._trackers = (DeepSpeedRngTracker(),)
        self._weight_grads = WeightGradQueue(limit=0)
        self.guard = FailureGuard()
        self._told_of_units = False
        self.recorder = Recorder(clock_for(torch.device(self.device)))
        self._tracer = Tracer.of(config, self.guard)
        self.memory = MemoryWatch(self)
        self._units: StageUnits | None = self._stage_units()
        self.watchdog = Watchdog(config.watchdog)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        step = self.global_steps
        data_iter = self.memory.before_step(data_iter)
        with self.watchdog.step(f"training step {step}"), self.recorder.step(step):
            loss = super().train_batch(data_iter)
        self.memory.after_step()
        if self._units is not None and not self._told_of_units:
            self._tell_of_units()
        if self._tracer is not None:
            self._tracer.after_step(self, step)
        return loss

    def _count_all_stages_in_clip_norm(self) -> None:
        # In fp32 without ZeRO the host counts the parameters of the first rank of a pipeline, and of the others those
        # marked as split over ranks. What is whole on tensor-parallel ranks counts on the first of them, and nowhere
        # does a tied parameter's copy.
        whole_counts_here = self.grid.get_slice_parallel_rank() == 0
        for parameter in self.module.parameters():
            is_copy = getattr(parameter, "ds_pipe_replicated", False)
            parameter.model_parallel = whole_counts_here and not is_copy
            if is_copy:
                parameter.tensor_model_parallel = False

    def _refuse_recompute_of_parts(self) -> None:
        problem = plan_problem(self.ext_config, self.plan)
        if problem is not None:
            raise ConfigError(problem)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.watchdog.step("evaluation"):
            return super().eval_batch(*args, **kwargs)

    # -- schedules -----------------------------------------------------------------------------------------

    def _train_schedule(self) -> instructions.PlanSchedule:
        if self.plan.num_microbatches != self.micro_batches:
            self.resolve_again()
        self.recomputes = dict.fromkeys(self.plan.stages_of(self.stage_id), 0)
        self._weight_grads = WeightGradQueue(self.plan.max_deferred(self.stage_id), self.memory.note)
        if self._units is not None:
            self._units.start_step()
        return instructions.PlanSchedule(self.plan, self.stage_id, training=True)

    def resolve_again(self) -> None:
        """Make the plan anew: for another number of micro-batches, or with what is known by now."""
        config, known = self.ext_config, (self.memory.profile, self.memory.budgets(), self.memory.units)
        decide = partial(resolve.resolve, config, self.inventory, self.micro_batches, *known)
        self.resolution = self._decided_by_rank_0(decide) if decides_by_search(config) else decide()
        self.plan = self.resolution.plan
        self._units, self._told_of_units = self._stage_units(), False
        self._refuse_recompute_of_parts()
        self.recorder.clear()
        self.memory.predict()

    def _stage_units(self) -> StageUnits | None:
        """This stage's part of what a unit policy decided, at work."""
        tables = self.resolution.tables
        if tables is None:
            return None
        stage = self.stage_id
        return StageUnits(tables.stages[stage], self._trackers, tables.reserves[stage], self.memory.note)

    def recompute_report(self) -> list[StageRecompute]:
        """What every stage recomputed in the last step, by stage; empty without a unit policy. Collective."""
        tables = self.resolution.tables
        if tables is None or self._units is None:
            return []
        mine = stage_recompute(tables, self.stage_id, self._units.report)
        stages: list[Any] = [mine] * self.num_stages
        if self.num_stages > 1:
            dist.all_gather_object(stages, mine, group=self.grid.get_pipe_parallel_group())
        return sorted(stages, key=lambda stage: stage.stage)

    def _tell_of_units(self) -> None:
        self._told_of_units = True
        stages = self.recompute_report()
        if self.global_rank == 0:
            logger.info("%s", stage_report.table(stages))

    def _decided_by_rank_0(self, decide: Callable[[], resolve.Resolution]) -> resolve.Resolution:
        """What rank 0 decides, on every rank: a search that the clock ends may not find the same twice."""
        decided = self.guard.from_rank_0(decide)
        chosen, tables = decided.chosen, decided.tables
        if tables is not None and tables.fell_back and self.global_rank == 0:
            logger.warning(
                "recompute: the search ran out of time on stages %s, greedy tables stand in. Raise time_limit_s of the "
                "policy.",
                tables.fell_back,
            )
        if chosen is not None and self.global_rank == 0:
            logger.info(
                "auto: %s; %d candidates, ended by %s", chosen.reason, chosen.num_evaluations, chosen.stopped_by
            )
        return decided

    def _inference_schedule(self, micro_batches: int) -> instructions.PlanSchedule:
        plan = forward_plan(self.plan.rank_of, self.plan.layers_per_stage, micro_batches)
        return instructions.PlanSchedule(plan, self.stage_id, training=False)

    def _exec_schedule(self, pipe_schedule: instructions.PlanSchedule) -> None:
        if self._links is None:
            self._links = self._open_links()
        self._links.reset_shapes()
        self._num_loaded = 0
        self.guard.start_step()
        try:
            with self.memory.counting():
                super()._exec_schedule(pipe_schedule)
        except Exception as error:
            if self.guard.agreed:
                self._abandon_step()
                raise
            explained = self.memory.explained(error)
            self._abandon_step()
            self.guard.agree(explained)

    def _exec_finish_step(self) -> None:
        with self.watchdog.action("the end of the step, where all ranks meet"):
            self._channels.drain()
            self.guard.agree(None)
        self.recorder.actions_done(self.stage_id)
        self.memory.count_states()

    def _abandon_step(self) -> None:
        """Leave nothing of a failed step behind: no channel, buffer, gradient or running timer."""
        if self._links is not None:
            self._links.close()
            self._links = None
        for slots in self.pipe_buffers.values():
            slots[:] = [None] * len(slots)
        self._weight_grads.clear()
        self.memory.abandon()
        for timer in self.timers.get_timers().values():
            if timer.started_:
                timer.reset()
        self.loss = self.loss.detach()
        for parameter in self.module.parameters():
            parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            if self.using_bf16_optimizer:
                self.optimizer.clear_hp_grads()

    _HANDLERS: ClassVar[dict[Kind, Callable[..., None]]] = {
        Kind.F: ComputingPipelineEngine._exec_plan_forward,
        Kind.R: ComputingPipelineEngine._exec_plan_recompute,
        Kind.B: ComputingPipelineEngine._exec_plan_backward,
        Kind.I: ComputingPipelineEngine._exec_plan_input_grad,
        Kind.W: ComputingPipelineEngine._exec_plan_weight_grad,
        Kind.SEND_F: ChannelPipelineEngine._exec_send_outputs,
        Kind.SEND_B: ChannelPipelineEngine._exec_send_input_grads,
    }
    _INSTRUCTION_MAP = {
        **ComputingPipelineEngine._INSTRUCTION_MAP,
        **{instructions.INSTRUCTIONS[kind]: _recorded(kind, handler) for kind, handler in _HANDLERS.items()},
        instructions.PostActivations: ChannelPipelineEngine._exec_post_inputs,
        instructions.PostGradients: ChannelPipelineEngine._exec_post_output_grads,
        instructions.FinishStep: _exec_finish_step,
    }
