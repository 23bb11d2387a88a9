"""Dropped layers: a layer whose activations are not kept but re-run, early on demand of the plan or in backward.

Built on torch's non-reentrant checkpoint, which keeps one autograd graph, restores the default RNG streams and
autocast, and compares what the re-run saved with what the forward saved. Added here: the re-run can be started
before backward reaches the layer, further RNG streams are restored, decisions are replayed, re-runs are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup, checkpoint

from ext.core.replay import Memory


class RngTracker(Protocol):
    """Named RNG streams beside torch's default ones, as tensor-parallel hosts keep them."""

    def capture(self) -> Any:
        """The state of every stream."""

    def restore(self, state: Any) -> None:
        """Set every stream to a captured state."""


class MicrobatchRegions:
    """The dropped layers of one stage for one micro-batch, from its forward to the end of its backward."""

    def __init__(
        self,
        trackers: Sequence[RngTracker] = (),
        around_reruns: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """``trackers`` hold further random streams; every re-run runs inside an ``around_reruns()``."""
        self.num_reruns = 0
        self._around_reruns = around_reruns
        self._trackers = trackers
        self._group = GraphExecGroup()
        self._triggers: list[Any] = []

    def call(self, layer: Callable[[Any], Any], inputs: Any) -> Any:
        """``layer(inputs)`` without keeping its activations; ``inputs`` is a tensor or a tuple."""
        states = [tracker.capture() for tracker in self._trackers]
        memory = Memory()
        first = True

        def run(*args: Any) -> Any:
            nonlocal first
            # The trigger is the first thing the region saves, so it is the first that a re-run brings back.
            trigger = _Trigger.apply(torch.empty(0, requires_grad=True))
            if first:
                first = False
                self._triggers.append(trigger.grad_fn)
                with memory.recording():
                    return layer(args if is_tuple else args[0])
            self.num_reruns += 1
            with memory.replaying(), _restored(self._trackers, states), self._around_reruns():
                return layer(args if is_tuple else args[0])

        is_tuple = isinstance(inputs, tuple)
        return checkpoint(run, *(inputs if is_tuple else (inputs,)), use_reentrant=False)

    def recompute(self) -> None:
        """Re-run all dropped layers now, in forward order; backward finds their activations.

        Costs the activations of the dropped layers from here to the backward.
        """
        with self._group:
            for node in self._triggers:
                node.saved_tensors  # noqa: B018 - reading them is what starts the re-run
        self._triggers.clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Every backward over these layers runs inside: what was re-run early is not re-run again.

        Each layer's inputs are freed as soon as the backward is through it.
        """
        self.forget_triggers()
        with self._group:
            yield

    def forget_triggers(self) -> None:
        """Nothing will be re-run early any more. A trigger holds on to its layer's inputs."""
        self._triggers.clear()


class DroppedLayer:
    """Stands in for a layer while its forward runs for one micro-batch."""

    def __init__(self, layer: Callable[[Any], Any], regions: MicrobatchRegions) -> None:
        self._layer = layer
        self._regions = regions

    def __call__(self, inputs: Any) -> Any:
        return self._regions.call(self._layer, inputs)


class _Trigger(torch.autograd.Function):
    """A node apart from the layer's own graph; reading what it saved makes the region re-run."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor.new_empty(0))
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@contextmanager
def _restored(trackers: Sequence[RngTracker], states: Sequence[Any]) -> Iterator[None]:
    current = [tracker.capture() for tracker in trackers]
    for tracker, state in zip(trackers, states, strict=True):
        tracker.restore(state)
    try:
        yield
    finally:
        for tracker, state in zip(trackers, current, strict=True):
            tracker.restore(state)
