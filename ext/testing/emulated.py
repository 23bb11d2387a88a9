"""Emulated accelerators: layers that wait instead of computing.

Many ranks on a few CPU cores then behave as if each had its device: the engine, the autograd graph and the
communication are real, only the time of the computation is given. A wait ends at an absolute deadline and lets other
processes run. What comes on top per action is the cost of engine, autograd and messages that a real device would not
hide, some tenths of a millisecond, so stages should take 40 ms or more.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ext.core.replay import is_replaying
from ext.runtime.split_backward import WeightGradQueue, active_queue

_PR_SET_TIMERSLACK = 29

_IDLE = 1e-4
"""Seconds without computing from which on the host has waited for something."""


@dataclass(frozen=True)
class EmulatedTimes:
    """Seconds that a layer takes for one micro-batch.

    Attributes:
        forward: of a first forward.
        input_grad: of the gradient of the inputs, I.
        weight_grad: of the gradient of the weights, W; a full backward takes both.
        recompute: of a forward that runs again; as ``forward`` where None.
    """

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float | None = None

    def __post_init__(self) -> None:
        given = [self.forward, self.input_grad, self.weight_grad, self.rerun]
        if not all(0 <= seconds < float("inf") for seconds in given):
            raise ValueError(f"times must be finite and at least 0: {self}")

    @property
    def rerun(self) -> float:
        return self.forward if self.recompute is None else self.recompute

    def scaled(self, factor: float) -> EmulatedTimes:
        """All times multiplied, as for a layer that is one of several on a stage."""
        return replace(
            self,
            forward=self.forward * factor,
            input_grad=self.input_grad * factor,
            weight_grad=self.weight_grad * factor,
            recompute=None if self.recompute is None else self.recompute * factor,
        )


class EmulatedLayer(nn.Module):
    """``x * weight`` on ``(..., width)``, with the times of a real layer.

    The input and the weight pass through a node each before the product, so that their gradients can be computed
    apart, by `WeightGradQueue` as well as by torch.distributed.pipelining. A gradient of the inputs takes its time even
    where nobody wants it, as in a layer behind an embedding.

    Args:
        times: may be replaced later; read at every call.
        width: size of the last dimension.
    """

    def __init__(self, times: EmulatedTimes, width: int = 8) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.ones(width))
        sharpen_timers()

    def forward(self, x: Tensor) -> Tensor:
        anchor = torch.empty(0, requires_grad=True)
        queue = active_queue()
        x = _Input.apply(x, anchor, self)  # type: ignore[assignment]
        if queue is None:
            return x * _Weight.apply(self.weight, self)  # type: ignore[operator]
        return x * _DeferredWeight.apply(anchor, self, queue)  # type: ignore[operator]


def emulate(module: nn.Module, times: EmulatedTimes) -> None:
    """Give every emulated layer of a module these times."""
    for layer in module.modules():
        if isinstance(layer, EmulatedLayer):
            layer.times = times


def mean_loss(outputs: Tensor, labels: Any) -> Tensor:
    """A loss that takes no time."""
    return outputs.mean()


class _Queue(threading.local):
    """What the calling thread gave its device last."""

    def __init__(self) -> None:
        self.ends = 0.0
        self.seconds = 0.0
        self.woken = 0.0
        self.thread_time = 0.0


_queue = _Queue()


def wait(seconds: float) -> None:
    """Sleep until the device has done this much more work.

    As on a real accelerator, what the host computes between two pieces of work runs beside the first one, up to its
    length: the second then starts where the first has ended. Where the host has waited for anything in between, a
    message or a free core, the work starts now.
    """
    if seconds == 0:
        return
    now, thread_time = time.monotonic(), time.thread_time()
    has_waited = now - _queue.woken - (thread_time - _queue.thread_time) > _IDLE
    starts = now if has_waited else max(_queue.ends, now - _queue.seconds)
    _queue.ends, _queue.seconds = starts + seconds, seconds
    left = _queue.ends - now
    if left > 0:
        time.sleep(left)
    _queue.woken, _queue.thread_time = time.monotonic(), thread_time  # sleeping takes next to none; asking is a call


def sharpen_timers() -> None:
    """Let this thread's sleeps end within microseconds of their deadline; without effect outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


class _Input(torch.autograd.Function):
    """Waits for the forward, and in backward for the gradient of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer = layer
        # The hosts' own checkpointing calls a layer again from inside the backward.
        again = is_replaying() or torch._C._current_graph_task_id() != -1
        wait(layer.times.rerun if again else layer.times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wait(ctx.layer.times.input_grad)
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Waits in backward for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer = layer
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wait(ctx.layer.times.weight_grad)
        return grads[0], None


class _DeferredWeight(torch.autograd.Function):
    """As `_Weight`, in W where the backward is split. The weight is no input of it: its hooks belong to W."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layer: EmulatedLayer, queue: WeightGradQueue) -> Tensor:
        ctx.layer, ctx.queue = layer, queue
        return layer.weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layer, grad = ctx.layer, grads[0]

        def job() -> None:
            wait(layer.times.weight_grad)
            torch.autograd.backward(layer.weight, grad)

        ctx.queue.defer(job)
        return None, None, None
