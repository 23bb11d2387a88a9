"""What the ranks of an expert-parallel group must agree on before a token moves, or all stop with one text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ext.comm.agree import extremes, gathered
from ext.comm.topology import RankGroup
from ext.core.errors import RoutingError

_FACTOR_UNIT = 1_000_000


@dataclass(frozen=True)
class CallShape:
    """The numbers of one MoE call that decide sizes of messages.

    Attributes:
        num_tokens: of this rank; may differ between ranks.
        k: choices per token.
        capacity_factor: None without a capacity.
        hidden: width of a token.
    """

    num_tokens: int
    k: int
    capacity_factor: float | None
    hidden: int


def agree(shape: CallShape, logits: Tensor, group: RankGroup, layer: str) -> int:
    """The most tokens that any rank has. Collective over ``group``; one small all-reduce.

    Args:
        shape: of this rank.
        logits: (tokens, num_experts) of this rank.
        group: the expert-parallel group.
        layer: name of the layer, for the message.

    Raises:
        RoutingError: on all ranks with one text: a logit is NaN or infinite, or the ranks call with different
            numbers of choices, capacity factors or widths.
    """
    factor = -1 if shape.capacity_factor is None else round(shape.capacity_factor * _FACTOR_UNIT)
    known = torch.tensor([shape.num_tokens, shape.k, factor, shape.hidden], device=logits.device)
    # +inf and NaN show in the largest, -inf and NaN in the smallest; no tensor of the logits' size is made.
    bad = torch.zeros((), dtype=torch.bool, device=logits.device)
    if logits.numel():
        bad = ~(torch.isfinite(logits.amax()) & torch.isfinite(logits.amin()))
    largest, smallest = extremes(torch.cat([known, bad.view(1)]), group.process_group)
    if largest[1:] != smallest[1:] or largest[-1]:
        _explain(known.tolist(), logits, group, layer)
    return largest[0]


def _explain(known: list[int], logits: Tensor, group: RankGroup, layer: str) -> None:
    """Ask every rank for its numbers and raise with all of them."""
    bad_rows = int((~torch.isfinite(logits)).any(1).sum())
    rows = gathered([*known, bad_rows], group.process_group, logits.device)
    ranks = group.topology.ranks
    bad = [f"rank {rank}: {row[-1]} of {row[0]} tokens" for rank, row in zip(ranks, rows, strict=True) if row[-1]]
    if bad:
        raise RoutingError(
            f"MoE layer {layer}: the router's logits are NaN or infinite on {', '.join(bad)}. Lower the learning "
            "rate, check the data and the loss scale, or start again from the last checkpoint."
        )
    names = ("tokens", "k", "capacity factor", "hidden size")
    for column in (1, 2, 3):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            shown = [_shown(column, value) for value in values]
            each = ", ".join(f"{text} on rank {rank}" for rank, text in zip(ranks, shown, strict=True))
            raise RoutingError(
                f"MoE layer {layer}: the ranks of one expert-parallel group call with different values of "
                f"{names[column]}: {each}. Give the same on every rank."
            )


def _shown(column: int, value: int) -> str:
    if column != 2:
        return str(value)
    return "none (dropless)" if value < 0 else f"{value / _FACTOR_UNIT:g}"
