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
        """Read off the module's specs, so that every rank sees every stage without building it."""
        specs = module._layer_specs
        return cls(names_of(specs), eligible(specs, module.checkpointable_layers), tuple(map(int, module.parts)))

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


def names_of(specs: Sequence[Any]) -> tuple[str, ...]:
    """Class name of each layer, or what a function is called."""
    return tuple(
        spec.typename.__name__ if isinstance(spec, LayerSpec) else getattr(spec, "__name__", type(spec).__name__)
        for spec in specs
    )


def eligible(specs: Sequence[Any], classes: Sequence[str] | None) -> tuple[bool, ...]:
    """Whether each layer can be recomputed: modules, not plain functions, of one of the classes where any are named."""
    return tuple(
        isinstance(spec, LayerSpec | nn.Module) and (classes is None or name in classes)
        for spec, name in zip(specs, names_of(specs), strict=True)
    )


@contextmanager
def layers_replaced(module: PipelineModule, layers: Sequence[Any]) -> Iterator[None]:
    """While this lasts, the module's forward calls ``layers``; its parameters and checkpoint files stay as they are."""
    kept = module.forward_funcs
    module.forward_funcs = list(layers)
    try:
        yield
    finally:
        module.forward_funcs = kept
