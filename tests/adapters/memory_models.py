"""Small models of different kinds for tests of memory, as lists of pipeline layers."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional


class Words(nn.Module):
    """``(batch, seq)`` ids to ``(batch, seq, hidden)``; its weight may be tied."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, hidden, generator=_seed(vocab)) * 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Layer(nn.Module):
    """A pre-norm transformer layer with as wide an MLP as asked."""

    def __init__(self, seed: int, hidden: int, heads: int, ffn: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05, generator=_seed(seed))
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        return x + functional.dropout(self.down(functional.relu(self.up(self.norm2(x)))), self.dropout, self.training)


class Scores(nn.Module):
    """Final norm and logits with a weight of their own."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.linear.weight, std=0.05, generator=_seed(vocab + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def transformer(
    num_layers: int = 6,
    *,
    hidden: int = 32,
    vocab: int = 96,
    ffn: tuple[int, ...] = (128,),
    tied: bool = False,
    dropout: float = 0.0,
) -> list[Any]:
    """Specs of an embedding, layers whose MLP widths repeat ``ffn``, and a head."""
    blocks = [LayerSpec(Layer, 10 + i, hidden, 4, ffn[i % len(ffn)], dropout) for i in range(num_layers)]
    if tied:
        key = ("words", Words, vocab, hidden)
        return [
            TiedLayerSpec(*key),
            *blocks,
            LayerSpec(nn.LayerNorm, hidden),
            TiedLayerSpec(*key, forward_fn=Words.logits),
        ]
    return [LayerSpec(Words, vocab, hidden), *blocks, LayerSpec(Scores, hidden, vocab)]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """In fp32, over all tokens."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch(seed: int, vocab: int = 96, batch_size: int = 2, seq: int = 24) -> tuple[Tensor, Tensor]:
    """Ids and next ids."""
    ids = torch.randint(0, vocab, (batch_size, seq + 1), generator=_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def _seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
