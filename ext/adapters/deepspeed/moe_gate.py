"""DeepSpeed's TopKGate with its own formulas, but a capacity and a decision that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.moe.sharded_moe import TopKGate, gumbel_rsample, multiplicative_jitter
from torch import Tensor
from torch.nn import functional

from ext.comm.topology import RankGroup
from ext.core.errors import ConfigError
from ext.core.replay import is_replaying, remember
from ext.moe import losses
from ext.moe.agreement import CallShape, agree
from ext.moe.router import RouterConfig
from ext.moe.routing import Priority, Selection, kept_weights, select, top_k
from ext.moe.statistics import RouterStatistics


@dataclass(frozen=True)
class Routing:
    """What a gate hands to the dispatcher.

    Attributes:
        selection: which routes are kept.
        probs: (tokens, k) their weights, differentiable.
        l_aux: auxiliary loss, a scalar.
        max_tokens: the most tokens of any rank.
    """

    selection: Selection
    probs: Tensor
    l_aux: Tensor
    max_tokens: int


@dataclass(frozen=True)
class _Decision:
    selection: Selection
    max_tokens: int


class GateRouter:
    """Routes by a `TopKGate`'s weights and options: the same choices as the gate's own where all is even.

    Unlike the gate it agrees with the other ranks on the capacity, takes ranks with few or no tokens, and refuses
    logits that are not finite.
    """

    def __init__(self, gate: TopKGate, config: RouterConfig, layer: str) -> None:
        self.gate = gate
        self.config = config
        self.layer = layer
        self.num_experts = gate.wg.weight.shape[0]
        self.statistics = RouterStatistics(self.num_experts)
        self.bias = torch.zeros(self.num_experts) if config.bias_rate else None
        check_top_k(gate.k, self.num_experts, layer)

    def __call__(
        self,
        x: Tensor,
        used_tokens: Tensor | None,
        group: RankGroup,
        top_k_of_call: int | None = None,
        capacity_factor: float | None = None,
    ) -> Routing:
        """Route (tokens, hidden). Collective over ``group``, except in a re-run for recomputation.

        Args:
            x: tokens of this rank.
            used_tokens: nonzero for tokens that take part; absent: all.
            group: the expert-parallel group.
            top_k_of_call: choices per token of this call; absent: the gate's.
            capacity_factor: of this call; absent: the gate's.

        Raises:
            RoutingError: on all ranks, see `ext.moe.agreement.agree`.
            ConfigError: more choices than experts.
        """
        gate = self.gate
        k = gate.k if top_k_of_call is None else check_top_k(top_k_of_call, self.num_experts, self.layer)
        logits = self._logits(x)
        weights = logits.softmax(1)
        # Random numbers are drawn in a re-run too, so that what follows finds the streams where they were.
        noise = self._noise(logits, k)
        random = torch.rand_like(weights) if self._priority(k) is Priority.RANDOM and gate.drop_tokens else None
        decision: _Decision = remember(
            lambda: self._decide(logits, weights, x.shape[1], k, used_tokens, group, capacity_factor, noise, random)
        )
        selection = decision.selection
        if not is_replaying() and not _in_backward():
            self.statistics.add(selection)
        probs = kept_weights(weights, selection, normalize=k > 1)
        return Routing(selection, probs, self._loss(logits, weights, selection, k, noise), decision.max_tokens)

    def _logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        inputs = x.to(wide)
        if self.gate.noisy_gate_policy == "Jitter" and self.gate.training:
            inputs = multiplicative_jitter(inputs, device=x.device)
        return functional.linear(inputs, self.gate.wg.weight.to(wide))

    def _noise(self, logits: Tensor, k: int) -> Tensor | None:
        """Gumbel noise for the first choice, or at k = 2 for the second, as the gate has it."""
        gate = self.gate
        first = k == 1 and gate.noisy_gate_policy == "RSample" and gate.training
        second = k == 2 and gate.top2_2nd_expert_sampling
        return gumbel_rsample(logits.shape, device=logits.device).to(logits.dtype) if first or second else None

    @torch.no_grad()
    def _decide(
        self,
        logits: Tensor,
        weights: Tensor,
        hidden: int,
        k: int,
        used_tokens: Tensor | None,
        group: RankGroup,
        capacity_factor: float | None,
        noise: Tensor | None,
        random: Tensor | None,
    ) -> _Decision:
        gate = self.gate
        if capacity_factor is None:
            capacity_factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
        factor = float(capacity_factor) if gate.drop_tokens else None
        shape = CallShape(logits.shape[0], k, factor, hidden)
        max_tokens = agree(shape, logits, group, self.layer)
        capacity = None
        if factor is not None:
            capacity = host_capacity(max_tokens, self.num_experts, factor * k, gate.min_capacity)
        ids = self._choose(logits, weights, k, noise)
        selection = select(ids, weights, self.num_experts, capacity, self._priority(k), used_tokens, random)
        return _Decision(selection, max_tokens)

    def _choose(self, logits: Tensor, weights: Tensor, k: int, noise: Tensor | None) -> Tensor:
        if self.bias is not None:
            return top_k(weights + self.bias.to(weights.device), k)
        if k == 1:
            return top_k(weights if noise is None else logits + noise, 1)
        if k == 2:
            first = top_k(weights, 1)
            others = (logits if noise is None else logits + noise).scatter(1, first, float("-inf"))
            return torch.cat([first, top_k(others, 1)], 1)
        return top_k(weights, k)

    def _priority(self, k: int) -> Priority:
        if self.config.priority != "host":
            return Priority(self.config.priority)
        if k > 2:
            return Priority.PROBS
        return Priority.RANDOM if k == 1 and self.gate.use_rts else Priority.POSITION

    def _loss(self, logits: Tensor, weights: Tensor, selection: Selection, k: int, noise: Tensor | None) -> Tensor:
        kind = self.config.loss
        if kind == "none":
            loss = weights.sum() * 0
        elif kind == "load_importance":
            chosen = logits if noise is None else logits + noise
            loss = losses.load_importance_loss(logits, chosen.gather(1, selection.topk_ids), 1 / self.num_experts)
        elif kind == "host" and k > 2:
            loss = losses.top_k_loss(weights, selection.counts, k)
        else:
            loss = losses.gshard_loss(weights, selection.wanted_ids[:, 0])
        if self.config.z_loss:
            loss = loss + self.config.z_loss * losses.z_loss(logits)
        return loss


def host_capacity(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """DeepSpeed's capacity of an expert per source rank, in its arithmetic (fp32)."""
    capacity = torch.ceil((num_tokens / num_experts) * torch.tensor(factor)).to(torch.int64)
    return max(int(capacity), min_capacity)


def check_top_k(k: int, num_experts: int, layer: str) -> int:
    """``k``, if a token can choose so many experts.

    Raises:
        ConfigError: it cannot.
    """
    if not 1 <= k <= num_experts:
        raise ConfigError(
            f"MoE layer {layer}: k = {k}, allowed are 1 to {num_experts}, the number of experts. "
            "Lower k or raise num_experts."
        )
    return k


def _in_backward() -> bool:
    """Whether autograd is running: a forward that runs then is the host's recomputation."""
    return torch._C._current_graph_task_id() != -1
