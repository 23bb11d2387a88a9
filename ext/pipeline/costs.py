"""What a simulator or an adaptive schedule needs to know of a stage: times and activation sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitMemory:
    """What a stage holds for a micro-batch whose backward is split into I and W, in the unit of its activations.

    Attributes:
        waiting: from the end of I to the end of W: inputs of the weights' operations, gradients of their outputs.
        growth: most that an I holds at any one time beyond what it found, where nothing is recomputed inside it.
        working_set: the same where the recompute runs inside it.
    """

    waiting: float
    growth: float
    working_set: float


@dataclass(frozen=True)
class StageCosts:
    """Times and activation sizes of one stage for one micro-batch, in any one unit of time and of memory.

    Attributes:
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W; B takes input_grad + weight_grad.
        recompute: time to re-run all that the stage's forward drops; 0 where nothing is dropped.
        activations: all activations of the stage, as held without recomputation.
        dropped: the part of ``activations`` that the forward drops.
        stash: what is kept in place of the dropped part (the inputs of the dropped layers).
        working_set: what a recompute inside B holds at any one time (one layer, or ``dropped`` if less).
        message: size of the activations sent to the next stage, in the unit of the link's bandwidth.
        split: what I and W hold; None where that is not known.
    """

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float = 0.0
    activations: float = 1.0
    dropped: float = 0.0
    stash: float = 0.0
    working_set: float = 0.0
    message: float = 0.0
    split: SplitMemory | None = None

    @property
    def kept(self) -> float:
        """What a forward leaves behind: all that it does not drop, and the stash."""
        return self.activations - self.dropped + self.stash

    @property
    def split_memory(self) -> SplitMemory:
        """What I and W hold; where that is not known, a deferred W keeps every activation."""
        return self.split or SplitMemory(self.activations, growth=0.0, working_set=self.dropped)


@dataclass(frozen=True)
class Costs:
    """Costs of every stage, by stage, and of a message between ranks.

    Attributes:
        stages: by stage.
        latency: time between the end of an action and the arrival of its message on another rank.
        bandwidth: size per time of a link; a message adds ``message / bandwidth``. Infinite by default.
    """

    stages: tuple[StageCosts, ...]
    latency: float = 0.0
    bandwidth: float = float("inf")
