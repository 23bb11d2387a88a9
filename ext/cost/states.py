"""Bytes of parameters, gradients and optimizer states: what training holds whatever it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class States:
    """Bytes that one rank holds throughout a step.

    Attributes:
        parameters: weights, trained or not.
        gradients: gradients and their accumulators.
        optimizer: master weights and moments.
        buckets: buffers in which gradients are reduced.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buckets


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of a way of training.

    Attributes:
        parameter: of a parameter itself, trained or not.
        gradient: of a trained parameter's gradient and, where they are apart, of its accumulator.
        optimizer: of a trained parameter's master copy and moments, over all ranks that share them.
        shards: ranks that share the optimizer's part: data-parallel ranks under ZeRO 1, else 1.
        passing: the part of ``gradient`` that only the W of a split backward holds: it adds it to the accumulator.
        bucket: bytes per rank of the buffer in which gradients are reduced, where it lives through the backward.
    """

    parameter: float
    gradient: float
    optimizer: float
    shards: int = 1
    bucket: int = 0
    passing: float = 0.0

    def of(self, trained: int, frozen: int = 0) -> States:
        """The states of a rank with so many parameters."""
        return States(
            parameters=round(self.parameter * (trained + frozen)),
            gradients=round(self.gradient * trained),
            optimizer=round(self.optimizer * trained / self.shards),
            buckets=self.bucket,
        )


MIXED_ADAM = StateBytes(parameter=2, gradient=4, optimizer=12)
"""16-bit weights, 32-bit accumulated gradients, 32-bit master weights and two moments: 18 bytes per parameter."""
