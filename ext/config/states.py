"""What a ds_config says about the bytes of parameters, gradients and optimizer states.

How DeepSpeed 0.19.8 trains a pipeline: fp32 on the optimizer's own states; bf16 on BF16_Optimizer, which shares
master weights and moments among the replicas at ZeRO 0 too; ZeRO 1 on DeepSpeedZeroOptimizer, except for bf16 with
gradients accumulated in fp32, which is BF16_Optimizer again.
"""

from __future__ import annotations

from typing import Any

from ext.cost.states import StateBytes

MOMENTS = {
    "adagrad": 1,
    "adam": 2,
    "adamw": 2,
    "cpuadam": 2,
    "fusedadam": 2,
    "fusedlamb": 2,
    "fusedlion": 1,
    "lamb": 2,
    "lion": 1,
    "muon": 1,
    "onebitadam": 2,
    "onebitlamb": 2,
    "rmsprop": 1,
    "zerooneadam": 2,
}
"""Numbers that an optimizer keeps per parameter, by its name in small letters; SGD keeps one with momentum."""

DEFAULT_BUCKET = 500_000_000
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def state_bytes(ds_config: dict[str, Any], data_parallel: int, optimizer: str | None = None) -> StateBytes:
    """Bytes per parameter under this config.

    Args:
        ds_config: with the optimizer, the precision and ``zero_optimization``.
        data_parallel: replicas, among which ZeRO 1 shares.
        optimizer: name of the optimizer's class where the program makes it itself.
    """
    model = _BYTES[precision(ds_config)]
    accumulated = _BYTES.get(str((ds_config.get("data_types") or {}).get("grad_accum_dtype")), model)
    zero = (ds_config.get("zero_optimization") or {}).get("stage", 0)
    moments = 4.0 * _moments(ds_config, optimizer)
    if model == 4 and zero == 0:
        return StateBytes(parameter=4, gradient=4, optimizer=moments)
    if _is_on(ds_config, "bf16") and (zero == 0 or accumulated == 4):
        return StateBytes(2, gradient=2 + accumulated, optimizer=4 + moments, shards=data_parallel, passing=2)
    if zero == 0:
        return StateBytes(2, gradient=2, optimizer=4 + moments)
    elements = (ds_config.get("zero_optimization") or {}).get("reduce_bucket_size", DEFAULT_BUCKET)
    bucket = accumulated * int(elements if isinstance(elements, int | float) else DEFAULT_BUCKET)
    return StateBytes(model, gradient=accumulated, optimizer=4 + moments, shards=data_parallel, bucket=bucket)


def precision(ds_config: dict[str, Any]) -> str:
    """Of the parameters in training: fp32, fp16 or bf16."""
    return next((name for name in ("bf16", "fp16") if _is_on(ds_config, name)), "fp32")


def _is_on(ds_config: dict[str, Any], precision: str) -> bool:
    blocks = (ds_config.get(name) for name in ((precision, "bfloat16") if precision == "bf16" else (precision,)))
    return any(isinstance(block, dict) and block.get("enabled") is True for block in blocks)


def _moments(ds_config: dict[str, Any], optimizer: str | None) -> int:
    """Numbers per parameter; two where the optimizer is not known, which is the most that common ones keep."""
    block = ds_config.get("optimizer")
    name = optimizer or (block.get("type") if isinstance(block, dict) else None)
    if name is None:
        return 2
    if name.lower() == "sgd":
        params = block.get("params") if isinstance(block, dict) else None
        return int(bool((params or {}).get("momentum", 0)))
    return MOMENTS.get(name.lower(), 2)
