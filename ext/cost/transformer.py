"""Parameters, operations and bytes of a GPT: what one layer costs, and presets of whole models."""

from __future__ import annotations

from pydantic import Field, model_validator

from ext.core.errors import ConfigError, nearest
from ext.core.model import StrictModel


class TransformerShape(StrictModel):
    """A decoder-only transformer with learned positions, multi-head attention and a GELU MLP.

    Attributes:
        hidden_size: width of the residual stream.
        num_heads: attention heads.
        num_layers: transformer layers.
        seq_length: tokens of one sample.
        vocab_size: rows of the embedding.
        ffn_hidden_size: width of the MLP; 0 stands for 4 * hidden_size.
        bytes_per_element: of an activation (2 for 16-bit training).
    """

    hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    seq_length: int = Field(gt=0)
    vocab_size: int = Field(default=51200, gt=0)
    ffn_hidden_size: int = Field(default=0, ge=0)
    bytes_per_element: int = Field(default=2, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> TransformerShape:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of num_heads {self.num_heads}")
        return self

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Weights, biases and two layer norms of one layer."""
        h, f = self.hidden_size, self.ffn_size
        return 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h

    @property
    def embedding_parameters(self) -> int:
        """Token and position embedding; a tied head adds nothing."""
        return (self.vocab_size + self.seq_length) * self.hidden_size

    def layer_flops(self, micro_batch: int) -> float:
        """Operations of one layer's forward for ``micro_batch`` samples; causal attention is not halved."""
        tokens, h = micro_batch * self.seq_length, self.hidden_size
        return tokens * (8.0 * h * h + 4.0 * h * self.ffn_size + 4.0 * self.seq_length * h)

    def head_flops(self, micro_batch: int) -> float:
        """Operations of the logits' forward for ``micro_batch`` samples."""
        return 2.0 * micro_batch * self.seq_length * self.hidden_size * self.vocab_size

    def boundary_bytes(self, micro_batch: int) -> int:
        """Bytes of the activations between two layers: (micro_batch, seq_length, hidden_size)."""
        return micro_batch * self.seq_length * self.hidden_size * self.bytes_per_element


MODELS: dict[str, TransformerShape] = {
    "gpt-1.3b": TransformerShape(hidden_size=2048, num_heads=16, num_layers=24, seq_length=2048),
    "gpt-4.7b": TransformerShape(hidden_size=3072, num_heads=24, num_layers=40, seq_length=2048),
    "gpt-7b": TransformerShape(hidden_size=4096, num_heads=32, num_layers=32, seq_length=2048),
    "gpt-13b": TransformerShape(hidden_size=5120, num_heads=40, num_layers=40, seq_length=2048),
    "gpt-20b": TransformerShape(hidden_size=6144, num_heads=48, num_layers=44, seq_length=2048),
}


def model_preset(name: str) -> TransformerShape:
    """The model of that name.

    Raises:
        ConfigError: no such preset.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model preset '{name}'.{nearest(name, MODELS)} Known: {', '.join(MODELS)}.")
    return MODELS[name]
