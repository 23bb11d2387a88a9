"""Torch's own checkpointing of layers, the way users apply it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ext.testing.unit_layer import UnitLayer

Layers = Sequence[nn.Module]
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def full(layers: Layers, x: Tensor, *, reentrant: bool) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
    return x


def selective(layers: Layers, x: Tensor) -> Tensor:
    """Torch's selective checkpointing in its usual setting: products are kept, everything else is recomputed.

    Attention scores, which add their mask to the product, belong to the rest.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)  # type: ignore[assignment]
    return x


STOCK = {
    "full_reentrant": partial(full, reentrant=True),
    "full": partial(full, reentrant=False),
    "selective": selective,
}


class StockLayer(nn.Module):
    """A `UnitLayer` that checkpoints itself, and shows no units."""

    def __init__(self, mode: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner = UnitLayer(*args, **kwargs)
        self._mode = mode

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # or reentrant checkpointing would train nothing in the first layer
            x = x.detach().requires_grad_()
        return STOCK[self._mode]([self.inner], x)
