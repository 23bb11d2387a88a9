"""A GPT small enough for tests, as a list of layers; every layer draws its weights from a seed of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, HIDDEN, HEADS, SEQ = 64, 32, 4, 16


class TinyEmbedding(nn.Module):
    """Token and position embedding: ``(batch, seq)`` ids to ``(batch, seq, HIDDEN)``. Its weight may be tied."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator).mul(0.1).to(dtype))
        self.position = nn.Parameter(torch.randn(SEQ, HIDDEN, generator=generator).mul(0.1).to(dtype))

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight) + self.position[: ids.shape[1]]


class TinyBlock(nn.Module):
    """A pre-norm transformer block on ``(batch, seq, HIDDEN)``, or on a tuple with a mask behind it.

    A mask of ``(batch, seq)``, bool or integer, multiplies the block's output and is passed on.
    """

    def __init__(self, seed: int, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = dropout
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.qkv, self.proj, self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=0.1, generator=generator)
            nn.init.normal_(linear.bias, std=0.1, generator=generator)
        self.to(dtype)

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Any:
        x, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attention = self.proj(attention.transpose(1, 2).reshape(batch, seq, HIDDEN))
        x = x + functional.dropout(attention, self.dropout, self.training)
        hidden = self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        x = x + functional.dropout(hidden, self.dropout, self.training)
        return x if mask is None else (x * mask.to(x.dtype).unsqueeze(-1), mask)


class TinyHead(nn.Module):
    """Logits ``(batch, seq, VOCAB)`` with a weight of its own."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCAB, bias=False)
        nn.init.normal_(self.linear.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
        self.to(dtype)

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(inputs[0] if isinstance(inputs, tuple) else inputs)


def tied_logits(embedding: TinyEmbedding, x: Tensor) -> Tensor:
    """Logits with the embedding's weight, the ``forward_fn`` of a tied head."""
    return functional.linear(x, embedding.weight)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of ``(batch, seq, VOCAB)`` logits against ``(batch, seq)`` ids, in at least fp32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), labels.flatten())


def token_batch(seed: int, batch_size: int = 2, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    """Ids and next ids, each ``(batch, seq)``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch_size, seq + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
