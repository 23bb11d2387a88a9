"""The oracle for numbers: one process, the mean of the micro-batch losses, plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OracleStep:
    """One step of the whole model in one process.

    Attributes:
        loss: mean of the micro-batch losses, a scalar.
        gradients: by layer, the gradient of each of its parameters by name (None where there is none).
    """

    loss: Tensor
    gradients: list[dict[str, Tensor | None]]


def oracle_step(
    layers: Sequence[Callable[[Any], Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    microbatches: Iterable[tuple[Any, Any]],
) -> OracleStep:
    """Mean loss over ``microbatches`` and its gradient in every parameter of ``layers``.

    Gradients that the parameters hold are dropped first and left at the new value afterwards.

    Args:
        layers: called one after another; a parameter shared by several gets the sum.
        loss_fn: of the last output and the label.
        microbatches: pairs of input and label.
    """
    batches = list(microbatches)
    for layer in layers:
        if isinstance(layer, nn.Module):
            layer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for inputs, label in batches:
        outputs = inputs
        for layer in layers:
            outputs = layer(outputs)
        loss = loss_fn(outputs, label)
        if loss.requires_grad:
            (loss / len(batches)).backward()
        total = total + loss.detach() / len(batches)
    gradients = [
        {name: p.grad for name, p in layer.named_parameters()} if isinstance(layer, nn.Module) else {}
        for layer in layers
    ]
    return OracleStep(total, gradients)
