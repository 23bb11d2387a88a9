"""All tensors that an object of a host holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, tuple, set, frozenset)


def tensors_in(roots: Iterable[Any], packages: tuple[str, ...], beside: Iterable[str] = ()) -> Iterator[Tensor]:
    """Every tensor reachable through containers, modules, torch's optimizers and a host's own objects.

    Args:
        roots: where to start.
        packages: what the names of the modules begin with whose objects are looked into.
        beside: attributes of a parameter that hold tensors which belong to it, further to ``grad``.
    """
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
            gradients = item.grad if item.is_leaf else None, *(getattr(item, name, None) for name in beside)
            waiting += [gradient for gradient in gradients if gradient is not None]
        elif isinstance(item, nn.Module):
            # Megatron's DistributedDataParallel calls its gradient buffers what modules call the function for this.
            waiting += [*item.parameters(), *nn.Module.buffers(item)]
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, _CONTAINERS):
            waiting += item
        elif isinstance(item, torch.optim.Optimizer):
            waiting += [item.param_groups, dict(item.state)]
        elif type(item).__module__.startswith(packages):
            waiting += vars(item).values() if hasattr(item, "__dict__") else ()
