"""Unit costs and windows of a tensor-parallel transformer layer from formulas, where nothing has been measured."""

from __future__ import annotations

from typing import Any

from ext.core.errors import ConfigError
from ext.cost.collectives import all_reduce
from ext.cost.hardware import Device, Link
from ext.cost.transformer import TransformerShape
from ext.recompute.units import ATTENTION, MLP, LayerCosts, UnitCosts
from ext.recompute.windows import Window, backward_windows, forward_windows


def transformer_costs(
    shape: TransformerShape,
    *,
    micro_batch: int,
    device: Device,
    tensor_parallel: int = 1,
    link: Link | None = None,
    flash: bool = False,
) -> LayerCosts:
    """Sixteen units (with flash attention) or twenty (unfused), for one micro-batch on one rank.

    Matrix products are bound by compute, everything else by memory. The dropout mask behind the second all-reduce is
    always kept: recomputing it needs the layer's output.

    Args:
        shape: of the model.
        micro_batch: samples.
        device: gives the times.
        tensor_parallel: ranks that share the layer, without sequence parallelism.
        link: between these ranks; needed where there are several.
        flash: attention without stored scores.

    Raises:
        ConfigError: the heads do not divide, or the link is missing.
    """
    t, b, s, h, f = tensor_parallel, micro_batch, shape.seq_length, shape.hidden_size, shape.ffn_size
    if shape.num_heads % t or f % t:
        raise ConfigError(f"{shape.num_heads} heads and an MLP of {f} cannot be shared by {t} tensor-parallel ranks.")
    full = shape.boundary_bytes(b)
    part = full // t
    scores = shape.num_heads * s * s * b * shape.bytes_per_element // t
    mlp = b * s * f * shape.bytes_per_element // t
    mask = b * s * h
    reduce = _all_reduce_time(full, t, link)
    product, move = device.compute_time, device.memory_time
    attention_product = product(2.0 * s * s * b * h / t)

    def unit(name: str, *inputs: str, size: int, time: float, half: str = MLP, **flags: Any) -> UnitCosts:
        return UnitCosts(name, inputs, size, time, half=half, **flags)

    def early(name: str, *inputs: str, size: int, time: float, **flags: Any) -> UnitCosts:
        return unit(name, *inputs, size=size, time=time, half=ATTENTION, **flags)

    units = [
        early("ln1", size=full, time=move(2 * full)),
        early("qkv", "ln1", size=3 * part, time=product(6.0 * s * b * h * h / t), needed=False),
        early("bias_split", "qkv", size=3 * part, time=move(6 * part), needed=False),
        early("rope_q", "bias_split", size=part, time=move(2 * part)),
        early("rope_k", "bias_split", size=part, time=move(2 * part)),
        early("value", "bias_split", size=part, time=0.0),
    ]
    if flash:
        size = part + 4 * shape.num_heads * s * b // t
        units.append(early("flash", "rope_q", "rope_k", "value", size=size, time=2 * attention_product, uses_rng=True))
        context = "flash"
    else:
        units += [
            early("scores", "rope_q", "rope_k", size=scores, time=attention_product, needed=False),
            early("scale_mask", "scores", size=scores, time=move(2 * scores), needed=False),
            early("softmax", "scale_mask", size=scores, time=move(2 * scores)),
            early("dropout", "softmax", size=3 * scores // 2, time=move(2.5 * scores), uses_rng=True),
            early("context", "dropout", "value", size=part, time=attention_product),
        ]
        context = "context"
    units += [
        unit("proj", context, size=full, time=product(2.0 * s * b * h * h / t), needed=False),
        unit("ar1", "proj", size=full, time=reduce, needed=False, communication=t > 1),
        unit("dropout1", "ar1", size=mask, time=move(2.5 * full), uses_rng=True),
        unit("residual1", "dropout1", size=full, time=move(3 * full)),
        unit("ln2", "residual1", size=full, time=move(2 * full)),
        unit("fc1", "ln2", size=mlp, time=product(2.0 * s * b * h * f / t)),
        unit("bias", "fc1", size=mlp, time=move(2 * mlp), needed=False),
        unit("gelu", "fc1", size=mlp, time=move(2 * mlp)),
        unit("dropout2", "gelu", size=mask, time=move(2.5 * full), keep=True, uses_rng=True),
    ]
    fc2 = product(2.0 * s * b * h * f / t)
    forward = fc2 + sum(u.time for u in units if u.name not in ("ar1", "dropout2"))
    return LayerCosts(tuple(units), full, forward, 2 * forward)


def tensor_parallel_windows(
    shape: TransformerShape,
    *,
    micro_batch: int,
    device: Device,
    tensor_parallel: int,
    link: Link,
    host_overlaps_weight_grad: bool = True,
) -> tuple[Window, ...]:
    """F1, F2, B1, B2 of a layer without sequence parallelism; none for one rank.

    The capacity of a backward window is what is left of the all-reduce where the host already runs the weight
    gradient under it, as Megatron-core does.
    """
    if tensor_parallel == 1:
        return ()
    t, tokens, h = tensor_parallel, micro_batch * shape.seq_length, shape.hidden_size
    reduce = _all_reduce_time(shape.boundary_bytes(micro_batch), t, link)
    hidden_by_host = 1.0 if host_overlaps_weight_grad else 0.0
    fc1 = hidden_by_host * device.compute_time(2.0 * tokens * h * shape.ffn_size / t)
    qkv = hidden_by_host * device.compute_time(6.0 * tokens * h * h / t)
    return (
        *forward_windows(reduce, reduce),
        *backward_windows(max(0.0, reduce - fc1), max(0.0, reduce - qkv)),
    )


def _all_reduce_time(num_bytes: int, ranks: int, link: Link | None) -> float:
    if ranks == 1:
        return 0.0
    if link is None:
        raise ConfigError(f"{ranks} tensor-parallel ranks need a link. Give the bandwidth between them.")
    return all_reduce(num_bytes, ranks, link)
