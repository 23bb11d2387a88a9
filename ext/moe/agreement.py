"""What the ranks of an expert-parallel group must agree on before a token moves, or all stop with one text."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ext.comm.agree import extremes
from ext.comm.topology import RankGroup
from ext.core.errors import RoutingError


@dataclass(frozen=True)
class Call:
    """What one rank brings to one MoE call and the others must know.

    Attributes:
        num_tokens: may differ between ranks.
        k: choices per token.
        capacity_factor: None without a capacity.
        hidden: width of a token.
        dtype: of the tokens.
        problem: why this rank cannot go on; empty if it can.
        capacity: rows per expert, where the host derives them from this rank's tokens alone.
    """

    num_tokens: int
    k: int
    capacity_factor: float | None
    hidden: int
    dtype: torch.dtype
    problem: str = ""
    capacity: int | None = None

    @property
    def numbers(self) -> list[int]:
        """As whole numbers, equal where the values are; zeros where there is a problem."""
        if self.problem:
            return [0] * 6
        factor = -1 if self.capacity_factor is None else struct.unpack("<q", struct.pack("<d", self.capacity_factor))[0]
        dtype = zlib.crc32(str(self.dtype).encode())
        return [self.num_tokens, self.k, factor, self.hidden, dtype, -1 if self.capacity is None else self.capacity]

    @property
    def shared(self) -> dict[str, str]:
        """What must not differ between ranks, for people."""
        factor = "none (dropless)" if self.capacity_factor is None else f"{self.capacity_factor:.8g}"
        return {
            "k": str(self.k),
            "capacity factor": factor,
            "hidden size": str(self.hidden),
            "dtype": str(self.dtype),
            "capacity, which follows from the number of tokens": str(self.capacity),
        }


def agree(call: Call, logits: Tensor, group: RankGroup, layer: str) -> int:
    """The most tokens that any rank has. Collective over ``group``; one small message to every rank, or all-reduce.

    Args:
        call: of this rank.
        logits: (tokens, num_experts) of this rank; anything where the call has a problem.
        group: the expert-parallel group.
        layer: name of the layer, for the message.

    Raises:
        RoutingError: on all ranks with one text: a rank has a problem, a logit is NaN or infinite, or the ranks
            call with different numbers of choices, capacity factors, widths or dtypes.
    """
    known = torch.tensor(call.numbers, device=logits.device)
    bad = torch.tensor(bool(call.problem), device=logits.device)
    if logits.numel() and not call.problem:
        # +inf and NaN show in the largest, -inf and NaN in the smallest; no tensor of the logits' size is made.
        least, most = torch.aminmax(logits)
        bad = ~(torch.isfinite(most) & torch.isfinite(least))
    largest, smallest = extremes(torch.cat([known, bad.view(1)]), group.process_group)
    if largest[1:] != smallest[1:] or largest[-1]:
        raise RoutingError(f"MoE layer {layer}: {_explanation(call, logits, group)}")
    return largest[0]


def _explanation(call: Call, logits: Tensor, group: RankGroup) -> str:
    """What is wrong with the calls of all ranks. Collective."""
    num_bad = 0 if call.problem else int((~torch.isfinite(logits)).any(1).sum())
    everyone = [(call, num_bad)] * group.size
    if group.process_group is not None:
        dist.all_gather_object(everyone, (call, num_bad), group=group.process_group)
    calls = dict(zip(group.topology.ranks, (call for call, _ in everyone), strict=True))
    problems = {rank: call.problem for rank, call in calls.items() if call.problem}
    if problems:
        return "; ".join(f"{_where(problems, text, calls)}{text}" for text in dict.fromkeys(problems.values()))
    bad = [
        f"rank {rank}: {count} of {calls[rank].num_tokens} tokens"
        for rank, (_, count) in zip(calls, everyone, strict=True)
        if count
    ]
    if bad:
        return (
            f"the router's logits are NaN or infinite on {', '.join(bad)}. Lower the learning rate, check the data "
            "and the loss scale, or start again from the last checkpoint."
        )
    differing = []
    for name in call.shared:
        values = {rank: call.shared[name] for rank, call in calls.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {', '.join(f'{value} on rank {rank}' for rank, value in values.items())}")
    return (
        f"the ranks of one expert-parallel group call with different values of {'; of '.join(differing)}. Give the "
        "same on every rank."
    )


def _where(problems: dict[int, str], text: str, ranks: dict[int, Call]) -> str:
    """Which ranks have the problem, where it is not all of them."""
    found = [str(rank) for rank, problem in problems.items() if problem == text]
    if len(found) == len(ranks):
        return ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}: "
