"""Profiles of layers: times and bytes of one micro-batch, measured while the host runs its own forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ext.cost.profile import LayerProfile
from ext.recompute.profile import profile_layer
from ext.recompute.unit_engine import constants_of
from ext.recompute.units import LayerCosts
from ext.runtime.deferral import measure_deferral, tensors_of
from ext.runtime.live_bytes import LiveBytes, storage_key

NUM_TIMED = 2
"""Runs of which the fastest counts, behind those that warm up and are counted in bytes."""

NUM_COUNTED = 3
"""Runs of which the one that holds least counts: a collective's own thread may let go of its tensor a little late."""

T = TypeVar("T")

Run = Callable[[], tuple[Any, list[Tensor]]]
"""Runs a layer with gradients; gives its outputs and its inputs, those that need a gradient as leaves."""


class ReplayedIterator:
    """An iterator that remembers what it gave, so that it can be given again."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._given: list[Any] = []

    def __iter__(self) -> ReplayedIterator:
        return self

    def __next__(self) -> Any:
        self._given.append(next(self._iterator))
        return self._given[-1]

    def again(self) -> Iterator[Any]:
        """All of it from the start."""
        yield from self._given
        while True:  # what hosts pass may have no more than a next
            try:
                item = next(self._iterator)
            except StopIteration:
                return
            yield item


class ProfiledLayer:
    """Stands in for a layer during one forward without gradients, and runs it several times with them.

    No gradient reaches a parameter. Outputs say by ``requires_grad`` whether they would need one.

    Args:
        layer: called with one tensor, or one tuple of tensors.
        name: for the profile.
        recomputable: whether it can be recomputed.
        tied: (name, number) of parameters that it shares with other layers.
        constants: parameters and whatever else does not belong to the micro-batch; where None, the layer's own.
        synchronize: waits for the device.
        with_units: whether its units are measured, too, where it can be recomputed.
        with_deferral: whether it is measured, too, what waits for W where the backward is split.

    Attributes:
        needs_grad: says of each input tensor whether its gradient is computed; where None, they say so themselves.
        profile: of the last call; None before.
        unit_costs: of the last call, where they were asked for.
    """

    def __init__(
        self,
        layer: Callable[[Any], Any],
        name: str,
        *,
        recomputable: bool,
        tied: tuple[tuple[str, int], ...] = (),
        constants: Iterable[Tensor] | None = None,
        synchronize: Callable[[], None] = lambda: None,
        with_units: bool = False,
        with_deferral: bool = False,
    ) -> None:
        self._layer = layer
        self._name = name
        self._recomputable = recomputable
        self.needs_grad: Callable[[], Sequence[bool]] | None = None
        self._tied = tied
        self._constants = None if constants is None else list(constants)
        self._synchronize = synchronize
        self._with_units = with_units and recomputable
        self._with_deferral = with_deferral
        self.profile: LayerProfile | None = None
        self.unit_costs: LayerCosts | None = None

    def __call__(self, inputs: Any) -> Any:
        flags = [t.requires_grad for t in tensors_of(inputs)] if self.needs_grad is None else list(self.needs_grad())
        constant = list(constants_of(self._layer)) if self._constants is None else self._constants
        trained = [tensor for tensor in constant if tensor.requires_grad]

        def run() -> tuple[Any, list[Tensor]]:
            with torch.enable_grad():
                fresh = _detached(inputs, flags)
                return self._layer(fresh), tensors_of(fresh)

        storages = min((_StoragesOf(run, constant) for _ in range(NUM_COUNTED)), key=lambda found: found.transient)
        forward, input_grad, backward = self._times(run, trained)
        deferral = None
        if self._with_deferral:
            ends = storages.inputs, storages.outputs
            found = [measure_deferral(self._layer, inputs, flags, trained, constant, ends) for _ in range(NUM_COUNTED)]
            deferral = min(found, key=lambda one: one.growth)
        parameters = [tensor for tensor in constant if isinstance(tensor, nn.Parameter)]
        self.profile = LayerProfile(
            name=self._name,
            forward=forward,
            recompute=forward,
            input_grad=input_grad,
            weight_grad=max(0.0, backward - input_grad),
            storages=tuple(storages.sizes),
            inputs=storages.inputs,
            outputs=storages.outputs,
            saved=storages.saved,
            transient=storages.transient + max((p.numel() * p.element_size() for p in trained), default=0),
            trained=sum(parameter.numel() for parameter in trained),
            frozen=sum(parameter.numel() for parameter in parameters if not parameter.requires_grad),
            tied=self._tied,
            recomputable=self._recomputable,
            deferral=deferral,
        )
        if self._with_units:
            self.unit_costs = profile_layer(self._layer, inputs, NUM_TIMED)
        return storages.result

    def _times(self, run: Run, trained: Sequence[Tensor]) -> tuple[float, float, float]:
        """Seconds of the forward, of the gradient of the inputs, and of all gradients: the fastest of some runs."""
        forward: list[float] = []
        input_grad: list[float] = []
        backward: list[float] = []
        for _ in range(NUM_TIMED):
            for times, weights in ((input_grad, ()), (backward, trained)):
                start = self._now()
                outputs, inputs = run()
                middle = self._now()
                forward.append(middle - start)
                _backward(outputs, [*inputs, *weights])
                times.append(self._now() - middle)
        return min(forward), min(input_grad), min(backward)

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()


def shared_profiles(mine: tuple[T, ...], stage: int, group: Any) -> list[tuple[T, ...]]:
    """What the pipeline of global rank 0 measured, by stage, on every rank. Collective over the world.

    Args:
        mine: of the layers of this rank's stage.
        stage: which that is.
        group: ranks of this rank's pipeline.
    """
    pipeline: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(pipeline, (stage, mine), group=group)
    shared = [[layers for _, layers in sorted(pipeline, key=lambda entry: entry[0])]]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


class _StoragesOf:
    """One run of a layer as storages: what goes in and out, what stays for the backward, what passes.

    Attributes:
        sizes: bytes of each storage.
        inputs, outputs, saved: positions in ``sizes``.
        transient: most bytes held in forward or in the gradient of the inputs beyond ``saved`` and outputs.
        result: the outputs, without their graph.
    """

    def __init__(self, run: Run, constant: Sequence[Tensor]) -> None:
        self.sizes: list[int] = []
        self._position: dict[int, int] = {}
        kept, made = LiveBytes(constant), LiveBytes(constant)
        with made.created():
            with kept.saved():
                outputs, inputs = run()
            self.inputs = self._number_all(inputs)
            self.outputs = self._number_all(tensors_of(outputs))
            self.saved = tuple(self._number(key, size) for key, size in kept.storages.items())
            created = made.storages
            staying = sum(size for key, size in created.items() if key in self._position)
            most = made.peak
            self.result = _detached(outputs, [tensor.requires_grad for tensor in tensors_of(outputs)])
            made.peak = made.now
            _backward(outputs, inputs)
            self.transient = max(most, made.peak) - staying

    def _number_all(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(self._number(storage_key(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors)

    def _number(self, key: int, size: int) -> int:
        if key not in self._position:
            self._position[key] = len(self.sizes)
            self.sizes.append(size)
        return self._position[key]


def _backward(outputs: Any, wanted: Sequence[Tensor]) -> None:
    """Compute gradients of what is wanted and needs one, and forget them."""
    roots = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)


def _detached(values: Any, needs_grad: Sequence[bool]) -> Any:
    """The same tensors without their graph, as leaves that need a gradient where the flags say so."""
    flags = iter(needs_grad)

    def detach(value: Any) -> Any:
        return value.detach().requires_grad_(next(flags)) if isinstance(value, Tensor) else value

    return type(values)(map(detach, values)) if isinstance(values, tuple | list) else detach(values)
