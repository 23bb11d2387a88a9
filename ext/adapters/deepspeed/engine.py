"""A PipelineEngine that runs plans."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import engine as host
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch import distributed as dist

from ext.adapters.deepspeed import instructions, resolve
from ext.adapters.deepspeed.layers import LayerInventory, layers_replaced
from ext.adapters.deepspeed.memory import MemoryWatch
from ext.adapters.deepspeed.rng import DeepSpeedRngTracker
from ext.adapters.deepspeed.tracing import Tracer
from ext.comm.tensor_parallel.sub_pipeline import sub_pipelined
from ext.config import ExtConfig
from ext.config.decide import decides_by_search
from ext.config.sub_pipeline import num_parts, plan_problem
from ext.core.errors import ConfigError, DataError
from ext.pipeline.actions import Action, Kind
from ext.pipeline.build import forward_plan
from ext.pipeline.plan import Plan
from ext.pipeline.trace import LOAD
from ext.recompute import stage_report
from ext.recompute.regions import DroppedLayer, MicrobatchRegions
from ext.recompute.stage_report import StageRecompute, stage_recompute
from ext.recompute.stage_units import StageUnits
from ext.runtime.channels import Channel, Links, Message, TensorSpec, as_tuple
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


class PlanPipelineEngine(PipelineEngine):
    """Runs a plan through DeepSpeed's own schedule loop and instruction map.

    Buffers are indexed by micro-batch. Losses, gradients of the outputs and dropped layers are kept per
    micro-batch, where the host has one slot for all. Sends and receives are asynchronous, on one process group
    per direction and neighbour.
    """

    plan: Plan
    # The host's own, which it does not declare.
    module: Any
    optimizer: Any
    device: Any

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
        self._num_loaded = 0
        self._trackers = (DeepSpeedRngTracker(),)
        self._weight_grads = WeightGradQueue(limit=0)
        self.guard = FailureGuard()
        self._links: Links | None = None
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

    # -- compute -------------------------------------------------------------------------------------------

    def _exec_plan_forward(self, stage: int, microbatch: int) -> None:
        if self.is_first_stage() or self.is_last_stage():
            with self.recorder.waiting(LOAD, stage, microbatch), self.watchdog.waiting("the data iterator"):
                self._load_up_to(microbatch)
        if not self.is_first_stage():
            channel = self._channels.inputs_from(self.plan.rank_of[stage - 1])
            with self._waiting(channel, host.PIPE_RECV_INPUT_TIMER, Kind.RECV_F, stage, microbatch):
                self.pipe_buffers["inputs"][microbatch] = channel.wait(microbatch)
        with self._layers_as_planned(stage, microbatch):
            super()._exec_forward_pass(microbatch)
        self.memory.sample()
        outputs = self.pipe_buffers["outputs"][microbatch]
        if self.is_last_stage():
            if torch.is_grad_enabled():
                self.pipe_buffers["losses"][microbatch] = self.loss
            self.pipe_buffers["outputs"][microbatch] = None
            self.pipe_buffers["labels"][microbatch] = None
        elif torch.is_grad_enabled():
            self.pipe_buffers["output_specs"][microbatch] = _gradient_specs(outputs, stage)
        if not torch.is_grad_enabled():
            self.pipe_buffers["inputs"][microbatch] = None

    def _exec_plan_recompute(self, stage: int, microbatch: int) -> None:
        self.pipe_buffers["regions"][microbatch].recompute()

    def _exec_plan_backward(self, stage: int, microbatch: int) -> None:
        regions = self.pipe_buffers["regions"][microbatch]
        with contextlib.nullcontext() if regions is None else regions.backward():
            if self.is_last_stage():
                self._backward_from_loss(microbatch)
            else:
                self._backward_from_gradient(stage, microbatch)
        if regions is not None:
            self.recomputes[stage] += regions.num_reruns
            self.pipe_buffers["regions"][microbatch] = None
        if self.is_first_stage():
            self.pipe_buffers["inputs"][microbatch] = None

    def _exec_plan_input_grad(self, stage: int, microbatch: int) -> None:
        # The host's own checkpointing calls the layers again from inside the backward.
        layers = self._splittable(self.module.forward_funcs, stage, microbatch)
        with self._weight_grads.deferring(stage, microbatch), layers_replaced(self.module, layers):
            self._exec_plan_backward(stage, microbatch)
        self.memory.count_passing_gradients()

    def _exec_plan_weight_grad(self, stage: int, microbatch: int) -> None:
        # As around the host's own backward: its hooks take gradients that come at any other time for a mistake.
        self._running_engine_backward = True
        try:
            with self._accumulating_in_high_precision():
                self._weight_grads.release(stage, microbatch, self.memory.count_passing_gradients)
        finally:
            self._running_engine_backward = False

    @contextlib.contextmanager
    def _accumulating_in_high_precision(self) -> Iterator[None]:
        """Where the optimizer sums bf16 gradients in fp32, each is added once."""
        if not self.using_bf16_optimizer:
            yield
            return
        self.optimizer.clear_lp_grads(set_to_none=True)
        yield
        self.optimizer.update_hp_grads()
        self.optimizer.clear_lp_grads(set_to_none=True)

    def _backward_from_loss(self, microbatch: int) -> None:
        self.loss, self.pipe_buffers["losses"][microbatch] = self.pipe_buffers["losses"][microbatch], None
        if self.loss.requires_grad:
            super()._exec_backward_pass(microbatch)
        self.loss = self.loss.detach()

    def _backward_from_gradient(self, stage: int, microbatch: int) -> None:
        channel = self._channels.output_grads_from(self.plan.rank_of[stage + 1])
        with self._waiting(channel, host.PIPE_RECV_GRAD_TIMER, Kind.RECV_B, stage, microbatch):
            gradients = as_tuple(channel.wait(microbatch))
        outputs = [t for t in as_tuple(self.pipe_buffers["outputs"][microbatch]) if t.requires_grad]
        self.pipe_buffers["output_specs"][microbatch] = None
        self.pipe_buffers["outputs"][microbatch] = None
        if not outputs:
            return  # nothing on this stage or before it is trained
        if len(outputs) == 1:
            self.pipe_buffers["outputs"][microbatch], self.grad_layer = outputs[0], gradients[0]
        else:
            joined = _Join.apply(gradients, *outputs)
            self.pipe_buffers["outputs"][microbatch], self.grad_layer = joined, torch.ones_like(joined)
        super()._exec_backward_pass(microbatch)
        self.grad_layer = None

    @contextlib.contextmanager
    def _layers_as_planned(self, stage: int, microbatch: int) -> Iterator[None]:
        """While this lasts, the module's forward drops and defers what the plan recomputes and splits later."""
        if self._units is not None and torch.is_grad_enabled():
            with self._units_as_planned(self._units, stage, microbatch):
                yield
            return
        dropped = self.inventory.dropped(stage, self.plan.recomputed_layers[stage])
        is_split = (stage, microbatch) in self.plan.split_backwards
        parts = num_parts(self.ext_config)
        if not torch.is_grad_enabled() or not (dropped or is_split or parts > 1):
            yield
            return
        layers = self._splittable(sub_pipelined(self.module.forward_funcs, parts), stage, microbatch)
        if dropped:
            regions = MicrobatchRegions(self._trackers, self.memory.reruns)
            self.pipe_buffers["regions"][microbatch] = regions
            again = [self.recorder.with_reruns(layer, stage, microbatch) for layer in layers]
            layers = [DroppedLayer(again[i], regions) if i in dropped else layer for i, layer in enumerate(layers)]
        with layers_replaced(self.module, layers):
            yield

    @contextlib.contextmanager
    def _units_as_planned(self, units: StageUnits, stage: int, microbatch: int) -> Iterator[None]:
        """The same where the tables of a unit policy say what is dropped."""

        @contextlib.contextmanager
        def recomputing() -> Iterator[None]:
            with self.recorder.rerun(stage, microbatch), self.memory.reruns():
                yield

        is_split = (stage, microbatch) in self.plan.split_backwards
        around = self._weight_grads.interception if is_split else contextlib.nullcontext
        coming = self.plan.next_backwards.get((stage, microbatch))
        if ((stage, coming) in self.plan.split_backwards) != is_split:
            coming = None  # what surrounds this forward would surround the recompute of another kind of forward
        regions, layers = units.start(
            self.module.forward_funcs,
            around=around,
            recomputing=recomputing,
            next_backward=None if coming is None else self.pipe_buffers["regions"][coming],
        )
        self.pipe_buffers["regions"][microbatch] = regions
        with layers_replaced(self.module, layers):
            yield

    def _splittable(self, layers: Sequence[Any], stage: int, microbatch: int) -> list[Any]:
        """The layers, with weight gradients that can wait for W where the plan splits this backward."""
        if (stage, microbatch) not in self.plan.split_backwards:
            return list(layers)
        return [self._weight_grads.intercepting(layer) for layer in layers]

    # -- data and communication ----------------------------------------------------------------------------

    def _load_up_to(self, microbatch: int) -> None:
        """Micro-batch i is the i-th that the iterator gives, in whatever order forwards run."""
        while self._num_loaded <= microbatch:
            try:
                super()._exec_load_micro_batch(self._num_loaded)
            except StopIteration:
                raise DataError(
                    f"a step needs {self.micro_batches} micro-batches, the data iterator gave "
                    f"{self._num_loaded}. Give it more data, wrap it in deepspeed.utils.RepeatingLoader, or lower "
                    "gradient_accumulation_steps."
                ) from None
            self._num_loaded += 1

    def _exec_send_outputs(self, stage: int, microbatch: int) -> None:
        with self._timed(host.PIPE_SEND_OUTPUT_TIMER):
            outputs = self.pipe_buffers["outputs"][microbatch]
            self._channels.outputs_to(self.plan.rank_of[stage + 1]).send(outputs, microbatch)
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][microbatch] = None

    def _exec_post_inputs(self, stage: int, microbatch: int) -> None:
        self._channels.inputs_from(self.plan.rank_of[stage - 1]).post(microbatch)

    def _exec_send_input_grads(self, stage: int, microbatch: int) -> None:
        with self._timed(host.PIPE_SEND_GRAD_TIMER):
            inputs = [t for t in as_tuple(self.pipe_buffers["inputs"][microbatch]) if t.requires_grad]
            gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
            self._channels.input_grads_to(self.plan.rank_of[stage - 1]).send_known(gradients)
        self.pipe_buffers["inputs"][microbatch] = None

    def _exec_post_output_grads(self, stage: int, microbatch: int) -> None:
        specs = self.pipe_buffers["output_specs"][microbatch]
        self._channels.output_grads_from(self.plan.rank_of[stage + 1]).post(microbatch, specs)

    @property
    def _channels(self) -> Links:
        assert self._links is not None
        return self._links

    def _open_links(self) -> Links:
        rank_of = self.plan.rank_of
        return Links(
            [self.grid.stage_to_global(stage_id=rank) for rank in range(self.num_stages)],
            self.stage_id,
            zip(rank_of, rank_of[1:], strict=False),
            torch.device(self.device),
            dynamic=self.dynamic_shape,
        )

    def _start_timers(self, timer_names: Sequence[str]) -> None:
        # The host starts the backward timers in its pipeline engine and again in a hook of its base engine.
        super()._start_timers([name for name in timer_names if not self.timers(name).started_])

    def _stop_timers(self, timer_names: Sequence[str]) -> None:
        super()._stop_timers([name for name in timer_names if self.timers(name).started_])

    @contextlib.contextmanager
    def _waiting(self, channel: Channel, timer: str, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        what = f"micro-batch {microbatch} of {channel.name}"
        with self._timed(timer), self.recorder.waiting(str(kind), stage, microbatch), self.watchdog.waiting(what):
            yield

    @contextlib.contextmanager
    def _timed(self, timer: str) -> Iterator[None]:
        if not self.wall_clock_breakdown():
            yield
            return
        self.timers(timer).start()
        yield
        self.timers(timer).stop()

    _HANDLERS: ClassVar[dict[Kind, Callable[..., None]]] = {
        Kind.F: _exec_plan_forward,
        Kind.R: _exec_plan_recompute,
        Kind.B: _exec_plan_backward,
        Kind.I: _exec_plan_input_grad,
        Kind.W: _exec_plan_weight_grad,
        Kind.SEND_F: _exec_send_outputs,
        Kind.SEND_B: _exec_send_input_grads,
    }
    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        **{instructions.INSTRUCTIONS[kind]: _recorded(kind, handler) for kind, handler in _HANDLERS.items()},
        instructions.PostActivations: _exec_post_inputs,
        instructions.PostGradients: _exec_post_output_grads,
        instructions.FinishStep: _exec_finish_step,
    }


class _Join(torch.autograd.Function):
    """Several outputs as one, so that one backward serves them all: the host would run one for each."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


def _gradient_specs(outputs: Message, stage: int) -> tuple[TensorSpec, ...]:
    """The tensors for which the next stage sends a gradient back."""
    tensors = as_tuple(outputs)
    strangers = [type(t).__name__ for t in tensors if not isinstance(t, Tensor)]
    if strangers:
        raise DataError(f"stage {stage} must give a tensor or a tuple of tensors to the next one, found {strangers}.")
    return tuple(TensorSpec(tuple(t.shape), t.dtype, requires_grad=False) for t in tensors if t.requires_grad)
