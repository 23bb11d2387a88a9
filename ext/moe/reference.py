"""The oracle: one process, one token at a time. Slow and obvious; the dispatchers must give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def moe_reference(
    x: Tensor, topk_ids: Tensor, topk_probs: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """(tokens, hidden): for each token the sum over its choices of probability times the expert's output.

    Args:
        x: (tokens, hidden).
        topk_ids: (tokens, k) expert of each choice, -1 for a choice that is dropped.
        topk_probs: (tokens, k).
        experts: all experts of the layer.
    """
    rows = []
    for token, ids, probs in zip(x, topk_ids.tolist(), topk_probs, strict=True):
        total = token * 0
        for expert, prob in zip(ids, probs, strict=True):
            if expert >= 0:
                total = total + prob * experts[expert](token.unsqueeze(0))[0]
        rows.append(total)
    return torch.stack(rows) if rows else x * 1


def kept_reference(
    topk_ids: Tensor, weights: Tensor, capacity: int, priority: str, random: Tensor | None = None
) -> Tensor:
    """(tokens, k) whether each route stays within the capacity of its expert on this rank, one route at a time.

    Args:
        topk_ids: (tokens, k) chosen experts.
        weights: (tokens, num_experts).
        capacity: routes that an expert keeps.
        priority: "position", "batch", "probs" or "random", as in `ext.moe.routing.Priority`.
        random: (tokens, num_experts) for "random".
    """
    tokens, k = topk_ids.shape
    routes = [(t, j) for j in range(k) for t in range(tokens)]
    if priority == "batch":
        routes.sort(key=lambda route: (route[1], -float(weights[route[0]].max())))
    elif priority in ("probs", "random"):
        scores = weights if random is None or priority == "probs" else random
        routes.sort(key=lambda route: -float(scores[route[0], topk_ids[route]]))
    room = [capacity] * weights.shape[1]
    kept = torch.zeros(tokens, k, dtype=torch.bool)
    for token, choice in routes:
        expert = int(topk_ids[token, choice])
        if room[expert] > 0:
            room[expert] -= 1
            kept[token, choice] = True
    return kept
