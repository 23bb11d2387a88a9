"""What a PipelineModule is made of: its layers per stage, and which of them can be recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn


@dataclass(frozen=True)
class LayerInventory:
    """The layers of a whole pipeline, the same on every rank.

    Attributes:
        names: class name of each layer, in model order.
        recomputable: whether the layer can be recomputed.
        bounds: first layer of each stage, then the number of layers.
    """

    names: tuple[str, ...]
    recomputable: tuple[bool, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, module: PipelineModule) -> LayerInventory:
        """Read off the module's specs, so that every rank sees every stage without building it.

        A layer can be recomputed if it is a module, not a plain function, and is of a class named in
        ``checkpointable_layers`` where the module names any.
        """
        specs = module._layer_specs
        eligible = module.checkpointable_layers
        names = tuple(_name_of(spec) for spec in specs)
        recomputable = tuple(
            isinstance(spec, LayerSpec | nn.Module) and (eligible is None or name in eligible)
            for spec, name in zip(specs, names, strict=True)
        )
        return cls(names, recomputable, tuple(map(int, module.parts)))

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def recomputable_per_stage(self) -> tuple[int, ...]:
        return tuple(
            sum(self.recomputable[start:stop]) for start, stop in zip(self.bounds, self.bounds[1:], strict=False)
        )

    def dropped(self, stage: int, count: int) -> frozenset[int]:
        """Positions within the stage of its first ``count`` recomputable layers."""
        start, stop = self.bounds[stage : stage + 2]
        positions = [index - start for index in range(start, stop) if self.recomputable[index]]
        return frozenset(positions[:count])


def _name_of(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return getattr(spec, "__name__", type(spec).__name__)


@contextmanager
def layers_replaced(module: PipelineModule, layers: Sequence[Any]) -> Iterator[None]:
    """While this lasts, the module's forward calls ``layers``; its parameters and checkpoint files stay as they are."""
    kept = module.forward_funcs
    module.forward_funcs = list(layers)
    try:
        yield
    finally:
        module.forward_funcs = kept
