"""A profile of every stage of a Megatron pipeline, from one micro-batch that is not consumed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ext.adapters.megatron.layers import MegatronRngTracker, forwards_replaced, statistics_kept
from ext.adapters.megatron.step import Call, host_forward
from ext.adapters.megatron.units import BoundLayer, bound
from ext.cost.profile import LOSS, LayerProfile
from ext.recompute.units import LayerCosts
from ext.runtime.channels import Links
from ext.runtime.live_bytes import storage_key
from ext.runtime.profile import ProfiledLayer, ReplayedIterator


@dataclass(frozen=True)
class Measured:
    """One stage.

    Attributes:
        layers: what comes before and behind the transformer layers is the first and the last one.
        units: costs of the units of these layers but the loss, None where they cannot be recomputed and where nobody
            asked.
        data: gives all that the iterator of the call would have given.
    """

    layers: tuple[LayerProfile, ...]
    units: tuple[LayerCosts | None, ...]
    data: Any


BEFORE, BEHIND = "before the layers", "behind the layers"
_FUSION = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")


def profile_stage(
    call: Call,
    stage: int,
    num_stages: int,
    links: Links,
    layers: Sequence[nn.Module],
    *,
    with_units: bool = False,
    with_deferral: bool = False,
) -> Measured:
    """Profile the layers of this rank's stage on the next micro-batch of ``call``.

    Each stage measures in its turn: its transformer layers, what the forward step does before them (embedding), and
    what it does behind them (final norm, logits, loss), as one more layer each. Nothing is trained and no state of the
    model or of a random stream changes. Collective over the pipeline.

    Args:
        call: of a training step.
        stage: of this rank, which holds one.
        num_stages: of the pipeline.
        links: between its ranks.
        layers: transformer layers of this stage.
        with_units: whether the units of layers are measured, too.
        with_deferral: whether it is measured, too, what waits for W where the backward is split; `make_deferrable` has
            seen the model.
    """
    data = None if call.data_iterator is None else ReplayedIterator(call.data_iterator)
    inputs: Any = None
    if stage > 0:
        channel = links.inputs_from(stage - 1)
        channel.post(0)
        inputs = channel.wait(0)
    is_last = stage == num_stages - 1
    measured = _Stage(call, layers, data, inputs, is_last=is_last, with_units=with_units, with_deferral=with_deferral)
    with _untouched(call, layers):
        outputs, profiles = measured.measure()
    if stage < num_stages - 1:
        links.outputs_to(stage + 1).send(outputs, 0)
    links.drain()
    links.reset_shapes()
    return Measured(profiles, measured.units, call.data_iterator if data is None else data.again())


class _Stage:
    """One stage, one micro-batch, several runs of the forward step."""

    def __init__(
        self,
        call: Call,
        layers: Sequence[nn.Module],
        data: ReplayedIterator | None,
        inputs: Any,
        *,
        is_last: bool,
        with_units: bool,
        with_deferral: bool,
    ) -> None:
        self._call = call
        self._layers = layers
        self._data = data
        self._inputs = inputs
        self._is_last = is_last
        self._with_units = with_units
        self._with_deferral = with_deferral
        self._unit_costs: list[LayerCosts | None] = []
        self._profiles: list[LayerProfile] = []
        self._shared: dict[int, Tensor] = {}
        self._left: Any = None

    def measure(self) -> tuple[Any, tuple[LayerProfile, ...]]:
        """Outputs of the stage, and its profile."""
        with torch.no_grad(), forwards_replaced(self._layers, [self._profiled(layer) for layer in self._layers]):
            outputs = self._forward(self._inputs)
        inner = {id(parameter) for layer in self._layers for parameter in layer.parameters()}
        own = [p for p in self._call.model.parameters() if id(p) not in inner]
        constants = [*own, *_buffers_of(self._call.model)]
        around = partial(
            ProfiledLayer,
            recomputable=False,
            constants=constants,
            synchronize=_wait(),
            with_deferral=self._with_deferral,
        )
        before = around(self._before, BEFORE)
        before(() if self._inputs is None else self._inputs.detach().requires_grad_())
        behind = around(self._behind, LOSS if self._is_last else BEHIND)
        behind(_hidden(self._left).detach().requires_grad_())
        assert before.profile is not None
        assert behind.profile is not None
        first = self._with_shared(before.profile)
        # The run behind the layers has the one before them in front, which trains nothing; parameters count once.
        last = replace(
            behind.profile, forward=max(0.0, behind.profile.forward - first.forward), recompute=0.0, trained=0, frozen=0
        )
        return outputs, (first, *self._profiles, last)

    @property
    def units(self) -> tuple[LayerCosts | None, ...]:
        """Costs of the units of all layers of the profile but the loss."""
        return None, *self._unit_costs, *([] if self._is_last else [None])

    def _forward(self, inputs: Any) -> Any:
        data = None if self._data is None else self._data.again() if self._profiles else self._data
        outputs, _ = host_forward(self._call, self._call.forward_step_func, data, inputs, [], 0, is_last=self._is_last)
        return outputs

    def _profiled(self, layer: nn.Module) -> Callable[..., Any]:
        whole = bound(layer) if self._with_units else BoundLayer(layer, layer.forward)

        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            shared = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._shared.update((storage_key(tensor), tensor) for tensor in shared)
            whole.bind(*args, **kwargs)
            profiled = ProfiledLayer(
                whole,
                type(layer).__name__,
                recomputable=True,
                constants=[*layer.parameters(), *layer.buffers(), *shared],
                synchronize=_wait(),
                with_units=self._with_units,
                with_deferral=self._with_deferral,
            )
            profiled.needs_grad = lambda: [True]
            self._left = whole.as_host(profiled(hidden_states))
            assert profiled.profile is not None
            self._profiles.append(profiled.profile)
            self._unit_costs.append(profiled.unit_costs)
            return self._left

        return run

    def _before(self, inputs: Any) -> Tensor:
        """The forward step up to the first layer."""
        found: list[Tensor] = []

        def stop(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(hidden_states)
            raise _FirstLayer

        with forwards_replaced(self._layers[:1], [stop]), contextlib.suppress(_FirstLayer):
            self._forward(inputs if isinstance(inputs, Tensor) else None)
        return found[0]

    def _behind(self, hidden: Tensor) -> Any:
        """The forward step from the last layer's outputs on; what comes before leaves no graph."""
        rest = self._left[1:] if isinstance(self._left, tuple) else None

        def skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states if rest is None else (hidden_states, *rest)

        def enter(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            torch.set_grad_enabled(True)
            return hidden if rest is None else (hidden, *rest)

        stubs = [skip] * (len(self._layers) - 1) + [enter]
        with torch.no_grad(), forwards_replaced(self._layers, stubs):
            return self._forward(self._inputs)

    def _with_shared(self, profile: LayerProfile) -> LayerProfile:
        """What all layers are given, such as a mask, belongs to the micro-batch and lives as long as it."""
        sizes = [tensor.untyped_storage().nbytes() for tensor in self._shared.values()]
        start = len(profile.storages)
        positions = tuple(range(start, start + len(sizes)))
        return replace(profile, storages=(*profile.storages, *sizes), saved=(*profile.saved, *positions))


class _FirstLayer(BaseException):
    """Ends a forward step there; no ``except Exception`` of a user's may take it for an error."""


def _hidden(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


@contextlib.contextmanager
def _untouched(call: Call, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what a forward changes: random streams, buffers, counts of routers; gradients reach no parameter."""
    on_cuda = torch.cuda.is_available()
    tracker, config = MegatronRngTracker(), call.config
    random = torch.get_rng_state(), torch.cuda.get_rng_state() if on_cuda else None, tracker.capture()
    buffers = [(buffer, buffer.clone()) for buffer in _buffers_of(call.model)]
    fused = [(m, name) for m in call.model.modules() for name in _FUSION if getattr(m, name, False) is True]
    timers, config.timers = config.timers, None
    for module, name in fused:  # it would add to the gradients themselves
        setattr(module, name, False)
    try:
        with statistics_kept(layers):
            yield
    finally:
        config.timers = timers
        for module, name in fused:
            setattr(module, name, True)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1])
        tracker.restore(random[2])


def _buffers_of(model: nn.Module) -> Iterator[Tensor]:
    """Megatron's DistributedDataParallel calls its gradient buffers what modules call the function for this."""
    for module in model.modules():
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _wait() -> Callable[[], None]:
    return torch.cuda.synchronize if torch.cuda.is_available() else _nothing


def _nothing() -> None: ...
