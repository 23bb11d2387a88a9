"""A GPT written as a list of pipeline layers: pre-norm blocks, learned positions, a head tied to the embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

import ext
from ext.recompute.units import MLP, LayerUnits, Unit

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `sequence_length` is also the number of learned positions.

    With `num_experts` the MLP of every block is a mixture of so many, of which each token takes `top_k`, spread over
    `expert_parallel` ranks.
    """

    vocab_size: int
    num_layers: int = 8
    hidden_size: int = 128
    num_heads: int = 4
    sequence_length: int = 128
    dropout: float = 0.0
    num_experts: int | None = None
    top_k: int = 2
    expert_parallel: int = 1


class TokenEmbedding(nn.Module):
    """Token ids `(batch, sequence)` to vectors `(batch, sequence, hidden)`; its weight is the head's too."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size).normal_(std=INIT_STD))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """`(batch, sequence, hidden)` to scores over the vocabulary."""
        return F.linear(hidden, self.weight)


class Positions(nn.Module):
    """Adds a learned vector per position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.sequence_length, config.hidden_size).normal_(std=INIT_STD))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(hidden + self.weight[: hidden.shape[1]])


class Attention(nn.Module):
    """Causal self-attention through `scaled_dot_product_attention`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = _linear(config.hidden_size, 3 * config.hidden_size, INIT_STD)
        self.out = _linear(config.hidden_size, config.hidden_size, _residual_std(config))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.mix(self.qkv(hidden)))

    def mix(self, qkv: Tensor) -> Tensor:
        """``(batch, sequence, 3 x heads x head size)`` to what the heads read, one after another."""
        batch, sequence, _ = qkv.shape
        # Each (batch, heads, sequence, head size).
        query, key, value = qkv.view(batch, sequence, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, sequence, -1)


class Mlp(nn.Sequential):
    """Two linear layers with four times the hidden size between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(
            _linear(config.hidden_size, 4 * config.hidden_size, INIT_STD),
            nn.GELU(approximate="tanh"),
            _linear(4 * config.hidden_size, config.hidden_size, _residual_std(config)),
        )


class ExpertMlp(nn.Module):
    """A mixture of `Mlp` experts, DeepSpeed's layer; `ext.moe.router.aux_loss_weight` adds its auxiliary loss.

    Experts draw their weights one after another, so that every number of ranks builds the same ones.
    """

    def __init__(self, config: GPTConfig, num_experts: int) -> None:
        super().__init__()
        ranks = config.expert_parallel
        self.moe = MoE(config.hidden_size, Mlp(config), num_experts, ranks, config.top_k, capacity_factor=1.25)
        experts = [Mlp(config) for _ in range(num_experts)]
        first = dist.get_rank() % ranks * self.moe.num_local_experts if ranks > 1 else 0
        for local, expert in enumerate(cast(nn.ModuleList, self.moe.deepspeed_moe.experts.deepspeed_experts)):
            expert.load_state_dict(experts[first + local].state_dict())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.moe(hidden)[0]


class TransformerLayer(nn.Module):
    """One block, attention and MLP or experts, each behind its norm: the unit of partition and of recomputation.

    Policies that look into a layer decide about its `units`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = Mlp(config) if config.num_experts is None else ExpertMlp(config, config.num_experts)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))

    def units(self) -> LayerUnits:
        """The forward in pieces that are kept or recomputed one by one; experts are always kept."""
        attention = [
            Unit("norm1", self.attention_norm, ("x",)),
            Unit("qkv", self.attention.qkv, ("norm1",)),
            Unit("mix", self.attention.mix, ("qkv",)),
            Unit("residual", self._residual(self.attention.out), ("x", "mix"), MLP),
            Unit("norm2", self.mlp_norm, ("residual",), MLP),
        ]
        if not isinstance(self.mlp, Mlp):
            run = self._residual(self.mlp)
            experts = Unit("experts", run, ("residual", "norm2"), MLP, keep=True, communication=True)
            return LayerUnits((*attention, experts))
        expand, activation, contract = self.mlp
        mlp = [
            Unit("fc1", expand, ("norm2",), MLP),
            Unit("gelu", activation, ("fc1",), MLP),
            Unit("out", self._residual(contract), ("residual", "gelu"), MLP),
        ]
        return LayerUnits((*attention, *mlp))

    def _residual(self, module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda hidden, x: hidden + self.dropout(module(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32; `logits (batch, sequence, vocabulary)`, `labels (batch, sequence)`."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def layers(config: GPTConfig) -> list[LayerSpec]:
    """The model from tokens to logits, one entry per transformer block."""
    embedding = ("embedding", TokenEmbedding, config.vocab_size, config.hidden_size)
    return [
        TiedLayerSpec(*embedding),
        LayerSpec(Positions, config),
        *(LayerSpec(TransformerLayer, config) for _ in range(config.num_layers)),
        LayerSpec(nn.LayerNorm, config.hidden_size),
        TiedLayerSpec(*embedding, forward_fn=TokenEmbedding.logits),
    ]


def build(
    config: GPTConfig, num_stages: int, seed: int, ds_config: dict[str, Any], sample_batch: tuple[Tensor, Tensor]
) -> PipelineModule:
    """This rank's stage of the model, placed as `ext.pipeline.partition` says. Every rank must call it.

    Each layer draws its weights from a seed of its own, so that every number of stages builds the same model.

    Args:
        config: the sizes.
        num_stages: pipeline stages.
        seed: of the weights.
        ds_config: the whole ds_config.
        sample_batch: one micro-batch, for partitions that measure the layers.
    """
    blocks = TransformerLayer.__name__
    return build_from(layers(config), loss_fn, [blocks], seed, ds_config, sample_batch, num_stages=num_stages)


def build_from(
    specs: list[LayerSpec],
    loss: Callable[[Tensor, Tensor], Tensor],
    blocks: list[str],
    seed: int,
    ds_config: dict[str, Any],
    sample_batch: tuple[Tensor, Tensor],
    **placement: Any,
) -> PipelineModule:
    """The same from other layers; ``blocks`` are the classes that can be recomputed.

    ``placement`` is the ``num_stages`` or ``topology`` of a PipelineModule.
    """
    module = ext.pipeline_module(
        specs,
        config=ds_config,
        sample_batch=sample_batch,
        loss_fn=loss,
        checkpointable_layers=blocks,
        seed_layers=True,
        seed_fn=_seed_layer,
        base_seed=seed,
        **placement,
    )
    # Else each forward would seed its layers from a count that no checkpoint holds, alike on all replicas.
    module.seed_layers = False
    return module


def _seed_layer(seed: int) -> None:
    torch.manual_seed(int(seed))  # some partitions hand over NumPy integers


def _residual_std(config: GPTConfig) -> float:
    """Keeps the variance of the residual stream independent of depth (GPT-2, section 2.3)."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer
