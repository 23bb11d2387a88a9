"""DeepSpeed's TopKGate with its own formulas, but a capacity and a decision that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from deepspeed.moe.sharded_moe import TopKGate, gumbel_rsample, multiplicative_jitter
from torch import Tensor
from torch.nn import functional

from ext.adapters.deepspeed.moe_rerun import in_backward
from ext.comm.topology import RankGroup
from ext.core.errors import ConfigError
from ext.core.replay import is_replaying, remember
from ext.moe import losses
from ext.moe.agreement import Call, agree
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
        problem = top_k_problem(gate.k, self.num_experts)
        if problem:
            raise ConfigError(f"MoE layer {layer}: {problem}")

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
            RoutingError: on all ranks, also where only one of them is given what cannot work; see
                `ext.moe.agreement.agree`.
        """
        gate = self.gate
        k = gate.k if top_k_of_call is None else top_k_of_call
        call = self._checked(x, used_tokens, k, capacity_factor)
        if call.problem:
            agree(call, x, group, self.layer)  # raises, and so does the agreement of the others
        logits = self._logits(x)
        weights = logits.softmax(1)
        # Random numbers are drawn in a re-run too, so that what follows finds the streams where they were.
        noise = self._noise(logits, k)
        random = torch.rand_like(weights) if self._priority(k) is Priority.RANDOM and gate.drop_tokens else None
        decision: _Decision = remember(lambda: self._decide(call, logits, weights, used_tokens, group, noise, random))
        selection = decision.selection
        if not is_replaying() and not in_backward():
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

    def _checked(self, x: Tensor, used_tokens: Tensor | None, k: int, capacity_factor: float | None) -> Call:
        """What this rank brings, with everything about it that cannot work. No communication."""
        gate, hidden = self.gate, self.gate.wg.weight.shape[1]
        factor = None
        if gate.drop_tokens:
            factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
            factor = float(factor if capacity_factor is None else capacity_factor)
        problems = [top_k_problem(k, self.num_experts)]
        if factor is not None and not 0 <= factor < float("inf"):
            problems.append(f"capacity factor {factor:g}, allowed are finite numbers from 0. Change it.")
        if x.shape[1] != hidden or not x.is_floating_point():
            problems.append(
                f"tokens of width {x.shape[1]} and {x.dtype}, the layer takes floating-point tokens of width {hidden}. "
                "Give its hidden size."
            )
        if used_tokens is not None and used_tokens.numel() != x.shape[0]:
            problems.append(
                f"a mask of {used_tokens.numel()} used tokens for {x.shape[0]} tokens. Give one entry for every token."
            )
        return Call(x.shape[0], k, factor, x.shape[1], x.dtype, " ".join(filter(None, problems)))

    @torch.no_grad()
    def _decide(
        self,
        call: Call,
        logits: Tensor,
        weights: Tensor,
        used_tokens: Tensor | None,
        group: RankGroup,
        noise: Tensor | None,
        random: Tensor | None,
    ) -> _Decision:
        max_tokens = agree(call, logits, group, self.layer)
        capacity = None
        if call.capacity_factor is not None:
            factor = call.capacity_factor * call.k
            capacity = host_capacity(max_tokens, self.num_experts, factor, self.gate.min_capacity)
        ids = self._choose(logits, weights, call.k, noise)
        selection = select(ids, weights, self.num_experts, capacity, self._priority(call.k), used_tokens, random)
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


def top_k_problem(k: int, num_experts: int) -> str:
    """Why a token cannot choose ``k`` experts; empty if it can."""
    if isinstance(k, Integral) and 1 <= k <= num_experts:
        return ""
    return f"k = {k}, allowed are 1 to {num_experts}, the number of experts. Lower k or raise num_experts."
