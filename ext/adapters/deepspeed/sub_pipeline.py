"""Whether the layers of a module can be sub-pipelined."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.pipe import LayerSpec, PipelineModule

from ext.config.sub_pipeline import KEY


def problems(module: PipelineModule) -> Iterator[str]:
    """Why it would have no effect or could not work; the same on every rank."""
    if module._grid.get_slice_parallel_world_size() == 1:
        yield (
            f"{KEY}: 2 hides the all-reduces of layers that ranks share, and no rank shares one. Remove the key, or "
            "build the module with a topology of several 'model' ranks."
        )
    kinds = [spec.typename if isinstance(spec, LayerSpec) else type(spec) for spec in module._layer_specs]
    if not any(hasattr(kind, "segments") for kind in kinds):
        names = ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))
        yield (
            f"{KEY}: 2 needs layers that offer segments(), the module has {names}. "
            "Remove the key, or see ext.comm.tensor_parallel.sub_pipeline."
        )
    if module.activation_checkpoint_interval:
        yield (
            f"{KEY}: 2 keeps all activations of its layers, the module has activation_checkpoint_interval "
            f"{module.activation_checkpoint_interval}. Make that 0, or remove the key."
        )
