"""Stages made of profiled layers: times and bytes under every number of recomputed layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ext.cost.profile import Deferral, LayerProfile, parameters_of
from ext.cost.states import StateBytes, States
from ext.pipeline.costs import SplitMemory, StageCosts
from ext.pipeline.layout import LayerCosts
from ext.pipeline.passes import DEFAULT_LOOKAHEAD, MAX_UNFINISHED_SENDS

Storages = frozenset[int]

NUM_POSTED = DEFAULT_LOOKAHEAD + 1
"""Most receives of one channel that wait for the action which takes them."""


@dataclass(frozen=True)
class StageModel:
    """What one stage costs, by choice of what it recomputes: mostly, how many of its recomputable layers.

    Attributes:
        costs: by choice, from recomputing nothing to all that can be.
        fixed: what the stage holds beside activations, in their unit: states, buffers, passing temporaries.
        recomputed: by choice, how many layers recompute something; where empty, the choice is that number.
    """

    costs: tuple[StageCosts, ...]
    fixed: float = 0.0
    recomputed: tuple[int, ...] = ()

    def num_recomputed(self, choice: int) -> int:
        """Layers that recompute something."""
        return self.recomputed[choice] if self.recomputed else choice


def equal_layers(layer: LayerCosts, num_layers: int, *, may_recompute: bool = True) -> StageModel:
    """A stage of equal layers; recomputing them, a backward holds one at a time."""
    whole = StageCosts(
        forward=num_layers * layer.forward,
        input_grad=num_layers * layer.input_grad,
        weight_grad=num_layers * layer.weight_grad,
        activations=num_layers * layer.activations,
    )
    return StageModel(
        (
            whole,
            *(
                replace(
                    whole,
                    recompute=count * layer.recompute,
                    dropped=count * layer.activations,
                    stash=count * layer.stash,
                    working_set=layer.activations,
                )
                for count in range(1, num_layers + 1 if may_recompute else 1)
            ),
        )
    )


class Stage:
    """Consecutive layers on one stage, as the engine runs them.

    A recomputed layer keeps its inputs in place of what its backward needs. For every micro-batch in flight the
    engine holds the stage's inputs, and its outputs until their gradient came.

    Args:
        layers: in model order; on the last stage the loss is one of them.
        is_last: whether no outputs are sent on.
        copies_inputs: whether the first layer gets a copy of the inputs, as from DeepSpeed.
    """

    def __init__(self, layers: Sequence[LayerProfile], *, is_last: bool, copies_inputs: bool = True) -> None:
        self.layers = tuple(layers)
        self.is_last = is_last
        self._copies_inputs = copies_inputs
        self._sizes: list[int] = []
        self._inputs: list[Storages] = []
        self._saved: list[Storages] = []
        self._waiting: list[Storages] = []
        self._deferrals = [_deferral(layer) for layer in layers]
        carried: list[int] = []
        for layer, deferral in zip(layers, self._deferrals, strict=True):
            number = dict(zip(layer.inputs, carried, strict=False))
            for position, size in enumerate(layer.storages):
                if position not in number:
                    number[position] = len(self._sizes)
                    self._sizes.append(size)
            self._inputs.append(frozenset(number[i] for i in layer.inputs))
            self._saved.append(frozenset(number[i] for i in layer.saved))
            self._waiting.append(frozenset(number[i] for i in deferral.waiting))
            carried = [number[i] for i in layer.outputs]
        self._outputs: Storages = frozenset() if is_last else frozenset(carried)

    @cached_property
    def recomputable(self) -> tuple[int, ...]:
        """Positions of the layers that can be recomputed; the first ones are recomputed first."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recomputable)

    @property
    def input_bytes(self) -> int:
        """Bytes of the message that brings the inputs."""
        return self._bytes(self._inputs[0]) if self.layers else 0

    @property
    def output_bytes(self) -> int:
        """Bytes of the message that takes the outputs on; 0 on the last stage."""
        return self._bytes(self._outputs)

    @property
    def transient(self) -> int:
        """Most bytes that a layer's forward or backward holds for a moment, with inputs that it does not save."""
        passing = (self._bytes(inputs - saved) for inputs, saved in zip(self._inputs, self._saved, strict=True))
        return max((layer.transient + size for layer, size in zip(self.layers, passing, strict=True)), default=0)

    @property
    def most_growth(self) -> int:
        """Most bytes that the I of one layer holds beyond what its forward saved."""
        return max((deferral.growth for deferral in self._deferrals), default=0)

    @property
    def loss_bytes(self) -> int:
        """Bytes that the layers behind the last recomputable one hold per micro-batch, on the last stage."""
        return self._behind_the_last(self._saved)

    @property
    def waiting_loss_bytes(self) -> int:
        """Bytes of these layers that wait for W."""
        first = self._first_of_loss
        return self._behind_the_last(self._waiting) + sum(d.bytes for d in self._deferrals[first:] if self.is_last)

    @property
    def _first_of_loss(self) -> int:
        return self.recomputable[-1] + 1 if self.recomputable else 0

    def _behind_the_last(self, held: Sequence[Storages]) -> int:
        if not self.is_last:
            return 0
        first = self._first_of_loss
        before = frozenset[int]().union(*held[:first])
        return self._bytes(frozenset[int]().union(*held[first:]) - before)

    def costs(self, num_recomputed: int) -> StageCosts:
        """Seconds and bytes where the first ``num_recomputed`` recomputable layers are recomputed."""
        dropped = self.recomputable[:num_recomputed]
        brought_back = sum(self._bytes(self._saved[i] - self._inputs[i]) for i in dropped)
        everything = self._after_forward(())
        kept = self._after_forward(dropped)
        return StageCosts(
            forward=sum(layer.forward for layer in self.layers),
            input_grad=sum(layer.input_grad for layer in self.layers),
            weight_grad=sum(layer.weight_grad for layer in self.layers),
            recompute=sum(self.layers[i].recompute for i in dropped),
            activations=everything,
            dropped=brought_back,
            stash=kept - everything + brought_back,
            working_set=self._most_beyond(dropped, reruns=True),
            message=self.output_bytes,
            split=self._split(dropped),
        )

    def model(self, fixed: float = 0.0, *, may_recompute: bool = True) -> StageModel:
        """All choices of this stage; only that of keeping everything where it must not recompute."""
        most = len(self.recomputable) if may_recompute else 0
        return StageModel(tuple(self.costs(count) for count in range(most + 1)), fixed)

    def _held(self, dropped: Sequence[int]) -> list[Storages]:
        """What autograd holds for each layer between forward and backward."""
        return [self._inputs[i] if i in dropped else saved for i, saved in enumerate(self._saved)]

    def _after_forward(self, dropped: Sequence[int]) -> int:
        """Bytes that one micro-batch in flight holds."""
        held = self._outputs.union(*self._held(dropped))
        if self._copies_inputs:
            return self.input_bytes + self._bytes(held)
        return self._bytes(held.union(*self._inputs[:1]))

    def _split(self, dropped: Sequence[int]) -> SplitMemory | None:
        if all(layer.deferral is None for layer in self.layers):
            return None
        held = self._held(dropped)
        shared = frozenset[int]().union(*(waiting & kept for waiting, kept in zip(self._waiting, held, strict=True)))
        return SplitMemory(
            waiting=self._bytes(shared) + sum(self._left_apart(i, held[i]) for i in range(len(held))),
            growth=self._most_beyond(dropped, splits=True),
            working_set=self._most_beyond(dropped, reruns=True, splits=True),
        )

    def _most_beyond(self, dropped: Sequence[int], *, reruns: bool = False, splits: bool = False) -> int:
        """Most bytes that a backward holds at any one time beyond those it found.

        It frees layer after layer from the last one on, so most of what a recomputed layer brings back, and of what
        is left for W, takes the place of what the layers behind it have freed.

        Args:
            dropped: layers that are recomputed.
            reruns: whether inside of the backward; else they have been before.
            splits: whether it leaves the weight gradients to W.
        """
        held = self._held(dropped)
        holders = Counter(storage for storages in (*held, self._outputs) for storage in storages)
        now = most = 0
        for i in reversed(range(len(held))):
            back = self._bytes(self._saved[i] - held[i]) if i in dropped else 0
            now += back if reruns else 0
            most = max(most, now + (self._deferrals[i].growth if splits else 0))
            now += (self._left_apart(i, held[i]) if splits else 0) - back
            freed = held[i] - self._waiting[i] if splits else held[i]
            holders.subtract(freed)
            now -= self._bytes(storage for storage in freed if not holders[storage])
        return max(most, now)

    def most_in_weight_grads(self, gradient_bytes: float) -> float:
        """Most bytes that a W holds, or an I leaves, beyond what waits, with gradients of so many bytes per number."""
        now = most = at_once = 0.0
        for layer, deferral in reversed([*zip(self.layers, self._deferrals, strict=True)]):
            if not deferral.bytes:
                at_once += gradient_bytes * layer.trained  # an embedding, say, has its gradient in I
                continue
            now += gradient_bytes * layer.trained
            most = max(most, now)
            now -= deferral.bytes
        return max(most, at_once)

    def _left_apart(self, i: int, held: Storages) -> int:
        """Bytes that I leaves for the W of a layer beside what the forward holds for it."""
        return self._bytes(self._waiting[i] - held) + self._deferrals[i].bytes

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._sizes[storage] for storage in storages)


@dataclass(frozen=True)
class PipelineProfile:
    """What is known of a pipeline's stages.

    Attributes:
        stages: their profiled layers, by stage.
        state_bytes: of parameters, gradients and optimizer.
        max_unfinished_sends: messages of one channel that are kept until they have left.
        num_devices: that the ranks of all stages share; infinite where each has its own.
    """

    stages: tuple[Stage, ...]
    state_bytes: StateBytes
    max_unfinished_sends: int = MAX_UNFINISHED_SENDS
    num_devices: float = math.inf

    def states(self, stage: int) -> States:
        """Parameters, gradients and optimizer of a stage."""
        return self.state_bytes.of(*parameters_of(self.stages[stage].layers))

    def passing_gradients(self, stage: int) -> tuple[int, int]:
        """Bytes of gradients that are not there from the end of a W to the next I where all backwards are split.

        Returns:
            All of them, and the most that they add to what waits for W.
        """
        layers, each = self.stages[stage].layers, self.state_bytes.passing
        return round(each * parameters_of(layers)[0]), round(self.stages[stage].most_in_weight_grads(each))

    def messages(self, stage: int) -> int:
        """Most bytes of tensors that wait to be taken or to leave, beside those of micro-batches in flight."""
        if len(self.stages) == 1:
            return 0
        ends = self.stages[stage].input_bytes + self.stages[stage].output_bytes
        return (NUM_POSTED + self.max_unfinished_sends) * ends

    def fixed(self, stage: int) -> int:
        """Bytes that a stage holds beside the activations of micro-batches in flight."""
        return self.states(stage).total + self.stages[stage].transient + self.messages(stage)

    def models(self, may_recompute: Callable[[int], bool]) -> list[StageModel]:
        """The choices of every stage, for a schedule that may recompute where it says so."""
        return [
            stage.model(self.fixed(index), may_recompute=may_recompute(index))
            for index, stage in enumerate(self.stages)
        ]


def _deferral(layer: LayerProfile) -> Deferral:
    """Where it is not known what waits for W, everything does."""
    return layer.deferral or Deferral(layer.saved, 0)
