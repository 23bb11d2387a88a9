"""`ext.testing.unit_layer.UnitLayer` shared by several ranks: tests and benchmarks of windows under all-reduces."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ext.comm.tensor_parallel.rng import RngStream
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

    def __init__(
        self, hidden: int, heads: int, group: TensorParallelGroup, *, stream: RngStream | None = None, **options: Any
    ) -> None:
        super().__init__(hidden, heads, **options)
        self._fork = nullcontext if stream is None else stream.fork
        self.heads = heads // group.size
        self.qkv = ColumnParallelLinear(self.qkv, group, blocks=3)  # type: ignore[assignment]
        self.fc1 = ColumnParallelLinear(self.fc1, group)  # type: ignore[assignment]
        self.proj = RowParallelLinear(self.proj, group)  # type: ignore[assignment]
        self.fc2 = RowParallelLinear(self.fc2, group)  # type: ignore[assignment]
        with_reduce = ("residual", "out")
        units = self._make_units(options.get("compile_unit") or (lambda fn: fn)).units
        self._units = LayerUnits(tuple(replace(u, communication=u.name in with_reduce) for u in units))

    def _flash_attention(self, qkv: Tensor) -> Tensor:
        with self._fork():
            return super()._flash_attention(qkv)

    def _drop(self, probs: Tensor) -> Tensor:
        with self._fork():
            return super()._drop(probs)
