"""Which experts a token goes to, which routes a capacity keeps, and with what weight.

The decision (integers, no gradient) and the weights (differentiable in the router) are apart: a re-run for
recomputation keeps the first run's decision and computes only the weights again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ext.moe.dispatchers.base import count_locations


class Priority(str, Enum):
    """Which routes an expert keeps when more want it than its capacity.

    POSITION: first choices before second ones, in the order of tokens (GShard, arXiv:2006.16668, algorithm 1).
    BATCH: as POSITION, but tokens in the order of their highest weight, first choices of all tokens first
        (batch-prioritised routing, V-MoE, arXiv:2106.05974, section 4).
    PROBS: each expert keeps the routes with the highest weight.
    RANDOM: each expert keeps random ones (random token selection of DeepSpeed).
    """

    POSITION = "position"
    BATCH = "batch"
    PROBS = "probs"
    RANDOM = "random"


@dataclass(frozen=True)
class Selection:
    """The decision of one call; integers only.

    Attributes:
        topk_ids: (tokens, k) int64 chosen experts.
        wanted_ids: the same, -1 for tokens that take no part.
        is_kept: (tokens, k) whether a capacity, or a token mask, left the route.
        locations: (tokens, k) row of a kept route among those of its expert; None without a capacity.
        capacity: rows per expert and source rank; None for no limit.
        counts: (num_experts,) routes that wanted each expert.
    """

    topk_ids: Tensor
    wanted_ids: Tensor
    is_kept: Tensor
    locations: Tensor | None
    capacity: int | None
    counts: Tensor

    @property
    def kept_ids(self) -> Tensor:
        """(tokens, k) the expert of a kept route, -1 of another: what a dispatcher takes."""
        return torch.where(self.is_kept, self.topk_ids, -1)


def top_k(scores: Tensor, k: int) -> Tensor:
    """(tokens, num_experts) -> (tokens, k) ids by falling score; the lowest id where two are equal at k = 1."""
    if k == 1:
        return scores.argmax(1, keepdim=True)
    return scores.topk(k, dim=1).indices


@torch.no_grad()
def select(
    topk_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    capacity: int | None,
    priority: Priority = Priority.POSITION,
    used_tokens: Tensor | None = None,
    random: Tensor | None = None,
) -> Selection:
    """Decide which routes stay. No communication: ``capacity`` must have been agreed on by all ranks.

    Args:
        topk_ids: (tokens, k) int64 chosen experts, no expert twice for a token.
        weights: (tokens, num_experts) softmax of the router's logits, for the priorities that look at it.
        num_experts: experts of the layer.
        capacity: rows per expert; None keeps all.
        priority: who is kept.
        used_tokens: (tokens,) nonzero for tokens that take part; absent: all.
        random: (tokens, num_experts) random numbers for RANDOM.
    """
    is_used = torch.ones_like(topk_ids, dtype=torch.bool)
    if used_tokens is not None:
        is_used &= used_tokens.reshape(-1, 1) != 0
    ids = torch.where(is_used, topk_ids, -1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids.reshape(-1) + 1, torch.ones_like(ids.reshape(-1)))
    if capacity is None:
        return Selection(topk_ids, ids, is_used, None, None, counts[1:])
    k = ids.shape[1]
    if priority is Priority.POSITION or priority is Priority.BATCH:
        locations = _locations_by_choice(ids, num_experts, weights if priority is Priority.BATCH else None)
        is_kept = is_used & (locations < capacity)
    else:
        scores = random if priority is Priority.RANDOM else weights
        if scores is None:
            raise ValueError("the priority 'random' needs random numbers")
        order = scores.gather(1, topk_ids).reshape(-1).argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = count_locations(ids.reshape(-1, 1)[order], num_experts).reshape(-1)
        is_kept = is_used & (rank.view(-1, k) < capacity)
        locations = count_locations(torch.where(is_kept, ids, -1), num_experts)
    return Selection(topk_ids, ids, is_kept, locations, capacity, counts[1:])


def _locations_by_choice(ids: Tensor, num_experts: int, weights: Tensor | None) -> Tensor:
    """Rows by choice, then by token, or by falling highest weight where ``weights`` are given."""
    columns = ids
    order = None
    if weights is not None:
        order = weights.amax(1).argsort(descending=True, stable=True)
        columns = ids[order]
    # Down the columns: all first choices come before all second ones.
    counted = count_locations(columns.t().reshape(-1, 1), num_experts).view(ids.shape[1], -1).t()
    if order is None:
        return counted
    locations = torch.empty_like(counted)
    locations[order] = counted
    return locations


def kept_weights(weights: Tensor, selection: Selection, *, normalize: bool) -> Tensor:
    """(tokens, k) weights of the routes, 0 where not kept; differentiable in ``weights``.

    Args:
        weights: (tokens, num_experts) softmax of the router's logits.
        selection: the decision.
        normalize: divide by the sum over a token's kept routes.
    """
    of_routes = weights.gather(1, selection.topk_ids)
    if normalize:
        # Over experts, not over choices: the order of additions of DeepSpeed's own gates, so equal to them in bits.
        mask = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, selection.topk_ids, selection.is_kept)
        total = (weights * mask).sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        of_routes = of_routes / total
    return torch.where(selection.is_kept, of_routes, 0)
