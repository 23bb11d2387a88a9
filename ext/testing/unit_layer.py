"""A transformer layer that offers ``units()``: the reference for the unit engine, its tests and its benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ext.recompute.units import ATTENTION, MLP, LayerUnits, Unit, run_units


class UnitLayer(nn.Module):
    """A pre-norm block of attention and MLP on ``(batch, seq, hidden)``, causal, with dropout.

    Args:
        hidden: width.
        heads: attention heads.
        dropout: of attention probabilities and of both residual branches.
        flash: attention as one unit without stored scores; else scores, softmax, dropout and product apart.
        byte_masks: dropout masks of one byte per element, as torch has them on CUDA; that of the attention scores, dear
            to draw again, is a unit of its own.
        seed: of the weights.
        dtype: of the weights.
        compile_unit: applied to every unit's function, for example ``torch.compile``.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        dropout: float = 0.0,
        flash: bool = False,
        byte_masks: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        compile_unit: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.flash = heads, dropout, flash
        self.byte_masks = byte_masks and dropout > 0
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.qkv, self.proj, self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=0.1, generator=generator)
            nn.init.normal_(linear.bias, std=0.1, generator=generator)
        self.to(dtype)
        self._units = self._make_units(compile_unit or (lambda fn: fn))

    def units(self) -> LayerUnits:
        return self._units

    def forward(self, inputs: Tensor) -> Tensor:
        return run_units(self._units, (inputs,))

    def _make_units(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> LayerUnits:
        def unit(name: str, fn: Callable[..., Tensor], *inputs: str, half: str = ATTENTION) -> Unit:
            return Unit(name, wrap(fn), inputs, half)

        attention = (
            [unit("attention", self._flash_attention, "qkv")]
            if self.flash
            else [
                unit("scores", self._scores, "qkv"),
                unit("probs", self._softmax, "scores"),
                *(
                    [unit("mask", self._mask, "probs"), unit("dropped", self._masked, "probs", "mask")]
                    if self.byte_masks
                    else [unit("dropped", self._drop, "probs")]
                ),
                unit("attention", self._mix_masked if self.byte_masks else self._mix, "dropped", "qkv"),
            ]
        )
        return LayerUnits(
            (
                unit("ln1", self.norm1.forward, "x"),
                unit("qkv", self.qkv.forward, "ln1"),
                *attention,
                unit("residual", self._project, "attention", "x", half=MLP),
                unit("ln2", self.norm2.forward, "residual", half=MLP),
                unit("fc1", self.fc1.forward, "ln2", half=MLP),
                unit("gelu", functional.gelu, "fc1", half=MLP),
                unit("out", self._contract, "gelu", "residual", half=MLP),
            )
        )

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each ``(batch, heads, seq, head size)``."""
        batch, seq, width = qkv.shape
        return qkv.view(batch, seq, 3, self.heads, width // 3 // self.heads).permute(2, 0, 3, 1, 4).unbind()

    def _flash_attention(self, qkv: Tensor) -> Tensor:
        q, k, v = self._heads_of(qkv)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _scores(self, qkv: Tensor) -> Tensor:
        """Scaled and causal in one pass over them, as they are most of what a recompute writes."""
        q, k, _ = self._heads_of(qkv)
        batch, heads, seq, size = q.shape
        future = qkv.new_full((seq, seq), float("-inf")).triu(1)
        scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=size**-0.5)
        return scores.view(batch, heads, seq, seq)

    def _softmax(self, scores: Tensor) -> Tensor:
        return functional.softmax(scores, -1)

    def _drop(self, probs: Tensor) -> Tensor:
        return functional.dropout(probs, self.dropout, self.training)

    def _mask(self, probs: Tensor) -> Tensor:
        keep = 1 - self.dropout if self.training else 1.0
        return torch.empty_like(probs, dtype=torch.uint8).bernoulli_(keep)

    def _masked(self, probs: Tensor, mask: Tensor) -> Tensor:
        return probs * mask

    def _mix(self, probs: Tensor, qkv: Tensor) -> Tensor:
        return (probs @ self._heads_of(qkv)[2]).transpose(1, 2).flatten(2)

    def _mix_masked(self, probs: Tensor, qkv: Tensor) -> Tensor:
        """A mask only drops: what is left is scaled here, where there is less of it."""
        mixed = self._mix(probs, qkv)
        return mixed / (1 - self.dropout) if self.training else mixed

    def _project(self, mixed: Tensor, x: Tensor) -> Tensor:
        return x + self._dropout(self.proj(mixed))

    def _contract(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return residual + self._dropout(self.fc2(hidden))

    def _dropout(self, x: Tensor) -> Tensor:
        if self.byte_masks and self.training:
            return torch.native_dropout(x, self.dropout, True)[0]
        return functional.dropout(x, self.dropout, self.training)
