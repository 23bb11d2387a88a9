"""What a DeepSpeed engine holds beside activations, as tensors and as a prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ext.config.states import state_bytes
from ext.cost.states import StateBytes

_CONTAINERS = (list, tuple, set, frozenset)


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
    """Every tensor reachable through containers, modules, torch's optimizers and DeepSpeed's own objects."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if not item.is_meta:  # ZeRO keeps shapes as tensors without memory.
                yield item
            gradients = item.grad if item.is_leaf else None, getattr(item, "grad_accum", None)
            waiting += [gradient for gradient in gradients if gradient is not None]
        elif isinstance(item, nn.Module):
            waiting += [*item.parameters(), *item.buffers()]
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, _CONTAINERS):
            waiting += item
        elif isinstance(item, torch.optim.Optimizer):
            waiting += [item.param_groups, dict(item.state)]
        elif type(item).__module__.startswith("deepspeed.runtime."):
            waiting += vars(item).values() if hasattr(item, "__dict__") else ()
