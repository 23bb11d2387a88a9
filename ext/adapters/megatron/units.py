"""A TransformerLayer of Megatron's as units that are kept or recomputed one by one (Lynx, arXiv:2406.08756).

The units are the layer's own parts: norms, ColumnParallelLinear, attention, activation, RowParallelLinear with the
residual behind it. Code of Megatron that lies between two linear layers runs as it is, with these layers standing
still: what they would have computed is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP as HostMLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from ext.adapters.megatron.layers import forwards_replaced
from ext.adapters.megatron.linear import announced
from ext.recompute.units import ATTENTION, MLP, LayerUnits, Unit, run_units

_CHECKPOINTS = ("recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp")


def has_units(layer: nn.Module) -> bool:
    """Whether the layer is one that `LayerOfUnits` knows: attention and MLP of Megatron's own linear layers."""
    if not isinstance(layer, TransformerLayer) or not isinstance(layer.cross_attention, IdentityOp):
        return False
    attention, mlp = layer.self_attention, layer.mlp
    return (
        isinstance(attention, SelfAttention)
        and type(mlp) is HostMLP
        and all(isinstance(linear, ColumnParallelLinear) for linear in (attention.linear_qkv, mlp.linear_fc1))
        and all(isinstance(linear, RowParallelLinear) for linear in (attention.linear_proj, mlp.linear_fc2))
        and not any(getattr(layer, name, False) for name in _CHECKPOINTS)
        and not attention.checkpoint_core_attention
    )


class BoundLayer(nn.Module):
    """A layer of any kind for one micro-batch: called with hidden states alone, it gives what the layer gives.

    Args:
        layer: of the model.
        forward: its own forward.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward
        self._others: tuple[Any, Any] = (), {}

    def bind(self, *args: Any, **kwargs: Any) -> None:
        """Everything but the hidden states that the layer is called with."""
        self._others = args, kwargs

    def forward(self, hidden: Any) -> Any:
        args, kwargs = self._others
        return self._forward(hidden, *args, **kwargs)

    def as_host(self, outputs: Any) -> Any:
        """What the layer's caller expects for these outputs."""
        return outputs


class LayerOfUnits(nn.Module):
    """A layer for one micro-batch, unit by unit: called with hidden states alone, it gives hidden states.

    Args:
        layer: one that `has_units` knows.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer
        self._given: dict[str, Any] = {}

    def bind(self, *args: Any, **kwargs: Any) -> None:
        """Everything but the hidden states that the layer is called with."""
        self._given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}

    def as_host(self, outputs: Any) -> Any:
        """What the layer's caller expects for these outputs."""
        return outputs, self._given.get("context")

    def forward(self, hidden: Tensor) -> Tensor:
        return run_units(self.units(), (hidden,))

    def units(self) -> LayerUnits:
        """``x`` is the layer's input, ``(seq, batch, hidden)``."""
        layer, config = self.layer, self.layer.config
        attention, mlp = layer.self_attention, layer.mlp
        is_shared = config.tensor_model_parallel_size > 1
        gathers = is_shared and config.sequence_parallel
        exchanges = config.context_parallel_size > 1 or config.num_query_groups < config.tensor_model_parallel_size
        return LayerUnits(
            (
                Unit("input_layernorm", layer.input_layernorm, ("x",)),
                Unit("linear_qkv", _told(attention.linear_qkv), ("input_layernorm",), communication=gathers),
                Unit("core_attention", self._attend, ("linear_qkv",), ATTENTION, communication=exchanges),
                Unit("residual", self._project, ("core_attention", "x"), MLP, communication=is_shared),
                Unit("pre_mlp_layernorm", layer.pre_mlp_layernorm, ("residual",), MLP),
                Unit("linear_fc1", _told(mlp.linear_fc1), ("pre_mlp_layernorm",), MLP, communication=gathers),
                Unit("activation", self._activate, ("linear_fc1",), MLP),
                Unit("output", self._contract, ("activation", "residual"), MLP, communication=is_shared),
            )
        )

    def _attend(self, qkv: Tensor) -> Tensor:
        attention = self.layer.self_attention
        linear = attention.linear_qkv, attention.linear_proj
        with forwards_replaced(linear, [_given(qkv, None), _passed_on]):
            return attention(qkv, **{name: self._given.get(name) for name in _FOR_ATTENTION})[0]

    def _activate(self, hidden: Tensor) -> Tensor:
        mlp = self.layer.mlp
        bias = mlp.linear_fc1.bias if mlp.linear_fc1.skip_bias_add else None
        with forwards_replaced((mlp.linear_fc1, mlp.linear_fc2), [_given(hidden, bias), _passed_on]):
            return mlp(hidden)[0]

    def _project(self, attended: Tensor, residual: Tensor) -> Tensor:
        layer = self.layer
        output = announced(layer.self_attention.linear_proj, attended)
        with layer.bias_dropout_add_exec_handler():
            add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
            return add(output, residual, layer.hidden_dropout)

    def _contract(self, activated: Tensor, residual: Tensor) -> Tensor:
        layer = self.layer
        output = announced(layer.mlp.linear_fc2, activated)
        with layer.bias_dropout_add_exec_handler():
            add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
            hidden = add(output, residual, layer.hidden_dropout)
        return make_viewless_tensor(inp=hidden, requires_grad=hidden.requires_grad, keep_graph=True)


def bound(layer: nn.Module) -> BoundLayer | LayerOfUnits:
    """A layer for one micro-batch, unit by unit where that is possible."""
    return LayerOfUnits(layer) if has_units(layer) else BoundLayer(layer, layer.forward)


def as_host(layer: BoundLayer | LayerOfUnits, stand_in: Callable[[Any], Any]) -> Callable[..., Any]:
    """The forward of a layer whose part a stand-in takes, which is called with hidden states alone."""

    def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        layer.bind(*args, **kwargs)
        return layer.as_host(stand_in(hidden_states))

    return run


_ARGUMENTS = (
    "attention_mask", "context", "context_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin",
    "rotary_pos_cos_sin", "attention_bias", "inference_context", "packed_seq_params", "sequence_len_offset",
)  # fmt: skip
_FOR_ATTENTION = (
    "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin", "attention_bias",
    "packed_seq_params", "sequence_len_offset",
)  # fmt: skip


def _told(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: announced(linear, x)[0]


def _given(output: Tensor, bias: Any) -> Callable[..., Any]:
    return lambda *_, **__: (output, bias)


def _passed_on(x: Tensor, *_: Any, **__: Any) -> Any:
    return x, None
