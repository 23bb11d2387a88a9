"""What a DeepSpeed engine holds beside activations, as tensors and as a prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ext.config.states import state_bytes
from ext.cost.states import StateBytes
from ext.runtime.reachable import tensors_in


def predicted_states(engine: Any) -> StateBytes:
    """Bytes per parameter as the engine's config and optimizer have them."""
    optimizer = engine.basic_optimizer
    return state_bytes(
        engine._config._param_dict, engine.dp_world_size, None if optimizer is None else type(optimizer).__name__
    )


def state_tensors(engine: Any) -> Iterator[Tensor]:
    """Parameters, buffers, gradients, and what the optimizer and its wrapper hold."""
    return _tensors_in([engine.module, engine.optimizer])


def optimizer_tensors(engine: Any) -> Iterator[Tensor]:
    """Moments and whatever else the optimizer keeps per parameter, made in its first step."""
    optimizer = engine.basic_optimizer
    return iter(()) if optimizer is None else _tensors_in(list(optimizer.state.values()))


def _tensors_in(roots: list[Any]) -> Iterator[Tensor]:
    return tensors_in(roots, ("deepspeed.runtime.",), ("grad_accum",))
