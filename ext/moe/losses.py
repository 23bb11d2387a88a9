"""Auxiliary losses of a router, each of one rank's tokens; 0 for a rank without tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def gshard_loss(weights: Tensor, first_choices: Tensor) -> Tensor:
    """(E / T^2) sum_e (sum_t weight_te) (tokens whose first choice is e): GShard, arXiv:2006.16668, section 2.2.

    Args:
        weights: (tokens, num_experts) softmax of the logits.
        first_choices: (tokens,) int64; -1 for a token that takes no part.
    """
    num_tokens, num_experts = weights.shape
    load = torch.zeros(num_experts + 1, dtype=weights.dtype, device=weights.device)
    load.scatter_add_(0, first_choices + 1, torch.ones_like(first_choices, dtype=weights.dtype))
    tokens = max(num_tokens, 1)
    return ((weights.sum(0) / tokens) * (load[1:] / tokens)).sum() * num_experts


def top_k_loss(weights: Tensor, counts: Tensor, k: int) -> Tensor:
    """As `gshard_loss`, over all k choices: E / k * sum_e mean weight * mean count (DeepSpeed's for k > 2)."""
    num_tokens, num_experts = weights.shape
    tokens = max(num_tokens, 1)
    load = counts.to(weights.dtype) / tokens
    return ((weights.sum(0) / tokens) * load).mean() * num_experts * num_experts / k


def load_importance_loss(logits: Tensor, topk_logits: Tensor, noise: float) -> Tensor:
    """Half the sum of the squared variations of importance and load (Shazeer et al., arXiv:1701.06538, appendix A).

    Args:
        logits: (tokens, num_experts) before noise.
        topk_logits: (tokens, k) of the chosen experts, after noise, falling.
        noise: the standard deviation that was added to the logits, above 0.
    """
    if logits.shape[0] == 0:
        return logits.sum()
    importance = logits.softmax(1).sum(0)
    threshold = topk_logits[:, -1:]
    normal = torch.distributions.Normal(0.0, noise)
    load = normal.cdf(logits - threshold).sum(0)
    return (_squared_variation(importance) + _squared_variation(load)) / 2


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of the squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906, equation 5)."""
    return logits.logsumexp(1).square().sum() / max(logits.shape[0], 1)


def _squared_variation(values: Tensor) -> Tensor:
    """(standard deviation / mean)^2, 0 for a single expert."""
    if values.numel() == 1:
        return values.sum() * 0
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return values.var() / (values.mean().square() + 1e-10)
