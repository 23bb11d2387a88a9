"""Dropped layers: a layer whose activations are not kept but re-run, early on demand of the plan or in backward.

As in torch's non-reentrant checkpoint there is one autograd graph, which saves tensors through a hook: what the forward
saves becomes a number, and the re-run, which saves the same tensors in the same order, brings them back and ends with
the last of them. Random numbers, autocast and the default device are those of the forward. Different from torch's: the
re-run can be started before backward reaches the layer, further RNG streams are restored, decisions are replayed,
re-runs are counted, and it costs about half of the host's time per layer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from ext.core.replay import Memory
from ext.recompute.ambient import AutocastState, RngState, RngTracker, default_device


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
        self._regions: list[_Region] = []

    def call(self, layer: Callable[[Any], Any], inputs: Any) -> Any:
        """``layer(inputs)`` without keeping its activations; ``inputs`` is a tensor or a tuple."""
        if not torch.is_grad_enabled():
            return layer(inputs)
        region = _Region(layer, inputs, self._trackers, self._rerun)
        self._regions.append(region)
        return region.forward(inputs)

    def recompute(self) -> None:
        """Re-run all dropped layers now, in forward order; backward finds their activations.

        Costs the activations of the dropped layers from here to the backward.
        """
        regions, self._regions = self._regions, []
        for region in regions:
            region.rerun()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Every backward over these layers runs inside.

        Each layer's inputs are freed as soon as the backward is through it.
        """
        self.forget()
        yield

    def forget(self) -> None:
        """Nothing will be re-run early any more. What waits for that holds on to its layer's inputs."""
        self._regions.clear()

    @contextmanager
    def _rerun(self) -> Iterator[None]:
        self.num_reruns += 1
        with self._around_reruns():
            yield


class DroppedLayer:
    """Stands in for a layer while its forward runs for one micro-batch."""

    def __init__(self, layer: Callable[[Any], Any], regions: MicrobatchRegions) -> None:
        self._layer = layer
        self._regions = regions

    def __call__(self, inputs: Any) -> Any:
        return self._regions.call(self._layer, inputs)


class _Region:
    """One call of a layer. It lives as long as the graph may ask for something that its forward has saved."""

    def __init__(
        self,
        layer: Callable[[Any], Any],
        inputs: Any,
        trackers: Sequence[RngTracker],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._layer, self._around = layer, around
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        tensors = [value for value in given if isinstance(value, Tensor)]
        self._is_tuple = isinstance(inputs, tuple)
        self._given = [_TENSOR if isinstance(value, Tensor) else value for value in given]
        # Saved apart from the layer's graph: hooks around the forward see the inputs, and torch finds out about changes
        # in place.
        kept: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)
        self._inputs: Any = kept.grad_fn
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), _CPU)
        self._rng = RngState.capture(device, trackers)
        self._autocast = AutocastState.capture(device)
        self._default_device = default_device()
        self._memory = Memory()
        self._saved: list[_Expected] = []

    def forward(self, inputs: Any) -> Any:
        """The layer's output."""
        with saved_tensors_hooks(self._drop, _take), self._memory.recording():
            return self._layer(inputs)

    def rerun(self) -> None:
        """Bring back what the forward has saved, as far as the graph still refers to it.

        Raises:
            CheckpointError: the layer saved something else this time.
        """
        if not self._saved:
            return
        expected = deque(self._saved)

        def bring_back(tensor: Tensor) -> Tensor:
            tensor = tensor.detach() if tensor.requires_grad else tensor  # a node with its own output is a cycle
            expected.popleft().give(tensor)
            if not expected:
                raise _AllBack
            return tensor

        with (
            suppress(_AllBack),
            saved_tensors_hooks(bring_back, _same),
            torch.enable_grad(),
            self._rng.restored(),
            self._autocast.restored(),
            self._default_device,
            self._memory.replaying(),
            self._around(),
        ):
            self._layer(self._inputs_again())
        if expected:
            raise CheckpointError(
                f"a layer saved {len(self._saved)} tensors for its backward, and {len(expected)} fewer when it was "
                "recomputed. What a layer does must depend on its inputs and on random numbers only."
            )

    def _inputs_again(self) -> Any:
        tensors = iter(self._inputs.saved_tensors)
        inputs = tuple(next(tensors) if value is _TENSOR else value for value in self._given)
        return inputs if self._is_tuple else inputs[0]

    def _drop(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self)
        self._saved.append(_Expected(weakref.ref(saved), tensor.shape, tensor.dtype, tensor.device))
        return saved


_TENSOR: Any = object()
_CPU = torch.device("cpu")


class _Saved:
    """Stands in the graph for a tensor; holds it from the re-run until the graph lets go."""

    __slots__ = ("__weakref__", "region", "tensor")

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.tensor: Tensor | None = None


def _take(saved: _Saved) -> Tensor:
    if saved.tensor is None:
        saved.region.rerun()
    assert saved.tensor is not None
    return saved.tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Expected(NamedTuple):
    """A tensor that the forward has saved. The graph may have let go of it."""

    saved: weakref.ref[_Saved]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def give(self, tensor: Tensor) -> None:
        found = tensor.shape, tensor.dtype, tensor.device
        if found != self[1:]:
            raise CheckpointError(
                f"a layer saved {_text(*self[1:])} for its backward, and {_text(*found)} when it was recomputed. What "
                "a layer does must depend on its inputs and on random numbers only."
            )
        saved = self.saved()
        if saved is not None:
            saved.tensor = tensor


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


class _AllBack(Exception):
    """Ends a re-run: nothing that it could still do is needed."""


class _Inputs(torch.autograd.Function):
    """A node that holds tensors and takes no part in backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nobody computes with what this node gives")
