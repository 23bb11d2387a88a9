"""`ext.testing.unit_layer.UnitLayer` shared by several ranks: tests and benchmarks of windows under all-reduces."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ext.comm.tensor_parallel.rng import RngStream
from ext.comm.tensor_parallel.sub_pipeline import Segment
from ext.recompute.units import LayerUnits
from ext.testing.unit_layer import UnitLayer


class SharedUnitLayer(UnitLayer):
    """One rank's part of the layer that `UnitLayer` is with the same arguments.

    Args:
        hidden: width of the whole layer.
        heads: of the whole layer.
        group: ranks that share it.
        stream: of this rank's dropout of attention probabilities, where each rank has other heads.
        options: as for `UnitLayer`.
    """

    qkv: Any  # parallel layers in the place of whole ones
    proj: Any
    fc1: Any
    fc2: Any

    def __init__(
        self, hidden: int, heads: int, group: TensorParallelGroup, *, stream: RngStream | None = None, **options: Any
    ) -> None:
        super().__init__(hidden, heads, **options)
        self._fork = nullcontext if stream is None else stream.fork
        self.heads, self.group = heads // group.size, group
        self.qkv = ColumnParallelLinear(self.qkv, group, blocks=3)
        self.fc1 = ColumnParallelLinear(self.fc1, group)
        self.proj = RowParallelLinear(self.proj, group)
        self.fc2 = RowParallelLinear(self.fc2, group)
        with_reduce = ("residual", "out")
        units = self._make_units(options.get("compile_unit") or (lambda fn: fn)).units
        self._units = LayerUnits(tuple(replace(u, communication=u.name in with_reduce) for u in units))

    def segments(self) -> list[Segment]:
        """The two halves, to be sub-pipelined."""
        return [
            Segment(self.norm1.forward, self._attend, partial(self._merge, self.proj)),
            Segment(self.norm2.forward, self._expand, partial(self._merge, self.fc2)),
        ]

    def _attend(self, x: Tensor) -> Tensor:
        qkv = self.qkv.local(x)
        if self.flash:
            return self.proj.local(self._flash_attention(qkv))
        return self.proj.local(self._mix(self._drop(self._softmax(self._scores(qkv))), qkv))

    def _expand(self, x: Tensor) -> Tensor:
        return self.fc2.local(functional.gelu(self.fc1.local(x)))

    def _merge(self, linear: RowParallelLinear, x: Tensor, output: Tensor) -> Tensor:
        return x + functional.dropout(linear.with_bias(output), self.dropout, self.training)

    def _flash_attention(self, qkv: Tensor) -> Tensor:
        with self._fork():
            return super()._flash_attention(qkv)

    def _drop(self, probs: Tensor) -> Tensor:
        with self._fork():
            return super()._drop(probs)
