"""Adding a loss of a layer to the training loss from where it arises, without carrying it to the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attach(x: Tensor, loss: Tensor, scale: Callable[[], float]) -> Tensor:
    """``x``, whose backward also adds ``scale()`` times the gradient of ``loss``.

    For a pipeline, where the training loss arises on another rank. The value of the training loss does not change.

    Args:
        x: what the layer returns.
        loss: a scalar, its weight included.
        scale: asked in backward: what the host multiplies the loss of a micro-batch with (loss scale over
            accumulation steps).
    """
    return _Attach.apply(x, loss, scale)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Callable[[], float]) -> Tensor:  # type: ignore[override]
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, torch.tensor(ctx.scale(), dtype=ctx.dtype, device=ctx.device), None
