"""What one layer costs for one micro-batch: times, bytes that its backward needs, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOSS = "loss"
"""Name of the loss where it is profiled as one more layer behind the model's own."""


@dataclass(frozen=True)
class Deferral:
    """What a layer holds where its backward is split into I and W.

    Attributes:
        waiting: positions, in the layer's storages, of inputs and outputs that its W needs.
        bytes: of all else that its W needs: what the forward saved within the layer, gradients of outputs.
        growth: most bytes that its I holds at any one time beyond what the forward saved.
    """

    waiting: tuple[int, ...]
    bytes: int
    growth: int = 0


@dataclass(frozen=True)
class LayerProfile:
    """One layer, measured or from a formula. Equal layers may share one profile.

    Bytes are given by storage, so that what neighbouring layers share is counted once: the outputs of a layer are
    the inputs of the next one, in order, and a storage may be an input, an output and saved at the same time.

    Attributes:
        name: of the layer's class.
        forward, recompute, input_grad, weight_grad: seconds.
        storages: bytes of each storage that the layer touches, without parameters.
        inputs, outputs: positions in ``storages`` of the tensors that it takes and gives.
        saved: positions of what its backward needs.
        transient: most bytes that its forward or backward holds for a moment beyond ``saved``.
        trained, frozen: number of its parameters with and without a gradient; a tied layer counts its copy.
        tied: (name, number) of trained parameters that it shares with other layers; a stage holds them once.
        recomputable: whether its activations can be dropped.
        deferral: what waits for its W; None where that is not known.
    """

    name: str
    forward: float
    recompute: float
    input_grad: float
    weight_grad: float
    storages: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    transient: int = 0
    trained: int = 0
    frozen: int = 0
    tied: tuple[tuple[str, int], ...] = ()
    recomputable: bool = True
    deferral: Deferral | None = None

    def bytes_of(self, positions: tuple[int, ...]) -> int:
        """Bytes of several storages, each counted once."""
        return sum(self.storages[position] for position in set(positions))


def parameters_of(layers: Sequence[LayerProfile]) -> tuple[int, int]:
    """Trained and frozen parameters that one stage with these layers holds, tied ones once."""
    shared = [tie for layer in layers for tie in layer.tied]
    trained = sum(layer.trained for layer in layers)
    trained -= sum(number for _, number in shared) - sum(dict(shared).values())
    return trained, sum(layer.frozen for layer in layers)
