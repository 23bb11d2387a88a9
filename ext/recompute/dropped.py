"""A unit that one layer dropped for one micro-batch: what is known of it, and its values while they are back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ext.core.replay import Memory
from ext.recompute.ambient import RngState
from ext.recompute.storage import View
from ext.recompute.units import Unit


class DroppedUnit:
    """A dropped unit of this run.

    Attributes:
        unit: what to run again.
        rng: random number streams before its forward.
        memory: decisions that its forward took.
        internals: shape and type of what its forward saved of its own.
        output: how its output lies in its storage.
        output_bytes: of its output, unless another unit or something that it saved itself holds them.
        saved_bytes: of what it saved of its own.
        output_read: whether the backward reads the output.
        references: times that the backward will read it.
        unread: references not read yet.
        readers: dropped units that read its output and have not been recomputed yet.
        value: its output, once recomputed and until it is freed.
        saved: what the recompute saved of its own.
        live: whether it is recomputed and not freed.
        runs: times that it was recomputed.
    """

    def __init__(self, unit: Unit, rng: RngState) -> None:
        self.unit = unit
        self.rng = rng
        self.memory = Memory()
        self.internals: list[tuple[torch.Size, torch.dtype]] = []
        self.output: View | None = None
        self.output_bytes = self.saved_bytes = 0
        self.output_read = False
        self.references = self.unread = 0
        self.readers: set[str] = set()
        self.value: Tensor | None = None
        self.saved: list[Any] = []
        self.live = False
        self.runs = 0

    @property
    def dropped_bytes(self) -> int:
        """That the forward does not hold because the unit is dropped."""
        return self.saved_bytes + (self.output_bytes if self.output_read else 0)

    @property
    def bytes(self) -> int:
        """That its recompute brings back."""
        return self.saved_bytes + self.output_bytes

    def gives(self, tensor: Tensor) -> bool:
        """Whether a tensor can be cut out of the recomputed output by sizes and strides alone."""
        same_type = self.output is not None and tensor.dtype == self.output.dtype
        return same_type and not tensor.is_conj() and not tensor.is_neg() and type(tensor) is Tensor
