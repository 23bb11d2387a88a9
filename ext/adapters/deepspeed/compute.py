"""What a stage computes: forward, recompute and backward of its micro-batches, in the host's own passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as host
from torch import Tensor

from ext.adapters.deepspeed.communication import ChannelPipelineEngine
from ext.adapters.deepspeed.layers import LayerInventory, layers_replaced
from ext.adapters.deepspeed.memory import MemoryWatch
from ext.comm.tensor_parallel.sub_pipeline import sub_pipelined
from ext.config import ExtConfig
from ext.config.sub_pipeline import num_parts
from ext.core.errors import DataError
from ext.pipeline.actions import Kind
from ext.pipeline.trace import LOAD
from ext.recompute.regions import DroppedLayer, MicrobatchRegions, RngTracker
from ext.recompute.stage_units import StageUnits
from ext.runtime.messages import Message, TensorSpec, as_tuple
from ext.runtime.split_backward import WeightGradQueue


class ComputingPipelineEngine(ChannelPipelineEngine):
    """Runs the layers of a stage as a plan wants: dropped and recomputed, with backwards whole or split.

    Attributes:
        ext_config: the user's.
        inventory: of the module's layers.
        memory: told of what is held.
        recomputes: layers that were run again in the last step, by stage.
    """

    ext_config: ExtConfig
    inventory: LayerInventory
    memory: MemoryWatch
    recomputes: dict[int, int]

    _trackers: Sequence[RngTracker]
    _weight_grads: WeightGradQueue
    _units: StageUnits | None

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
        coming = self.plan.next_backward(stage, microbatch)
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
