"""What a stage gets and gives: micro-batches from the data iterator, activations and gradients over channels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as host
from deepspeed.runtime.pipe.engine import PipelineEngine

from ext.core.errors import DataError
from ext.pipeline.actions import Kind
from ext.pipeline.plan import Plan
from ext.runtime.channels import Channel, Links
from ext.runtime.messages import as_tuple
from ext.runtime.recorder import Recorder
from ext.runtime.watchdog import Watchdog


class ChannelPipelineEngine(PipelineEngine):
    """Sends and receives of a plan, asynchronous, on one process group per direction and neighbour.

    Attributes:
        plan: that the engine runs.
        recorder: of the times of actions and waits.
        watchdog: told of what is waited for.
    """

    plan: Plan
    recorder: Recorder
    watchdog: Watchdog
    # The host's own, which it does not declare.
    module: Any
    optimizer: Any
    device: Any

    _links: Links | None = None
    _num_loaded = 0

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
