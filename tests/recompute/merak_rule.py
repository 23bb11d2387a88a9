"""Merak's rule for recomputed layers per stage, as its paper has it, to compare with."""

from __future__ import annotations

import math


def merak_shares(first: float, num_stages: int) -> list[float]:
    """Share of recomputed layers of each stage from that of stage 0 (arXiv:2206.04959, section 4.3)."""
    p = num_stages
    return [max(0.0, 1 - (1 - first) * (p - 1) / (p - 1 - i)) for i in range(p - 1)] + [0.0]


def merak_first_share(budget: float, num_stages: int) -> float:
    """The share of stage 0 for which the rule's peaks, A(1 + (p-1-i)(1-rho_i)), equal ``budget`` in A."""
    return 1 - (budget - 1) / (num_stages - 1)


def merak_layers(first: float, num_stages: int, layers: int) -> tuple[int, ...]:
    """In whole layers, rounded up; the stage before the last follows the one before it."""
    shares = merak_shares(first, num_stages)
    if num_stages > 2:
        shares[num_stages - 2] = shares[num_stages - 3]
    return tuple(math.ceil(layers * share - 1e-9) for share in shares)
