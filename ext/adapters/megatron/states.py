"""Bytes of parameters, gradients and optimizer states as Megatron trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from ext.cost.states import StateBytes

ADAM_MOMENTS = 2


def state_bytes(model: nn.Module, host_config: Any, data_parallel: int, moments: int = ADAM_MOMENTS) -> StateBytes:
    """Bytes per parameter of a model chunk.

    The parameters of experts are counted as shared among as many ranks as the others. Moments are 32-bit.

    Args:
        model: as Megatron passes it to a forward-backward function.
        host_config: its ``TransformerConfig``.
        data_parallel: ranks among which the distributed optimizer shares.
        moments: numbers that the optimizer keeps per parameter.
    """
    ddp: Any = getattr(model, "ddp_config", None)
    parameter = 4 if host_config.params_dtype.itemsize == 4 else 2
    is_summed_in_fp32 = ddp is not None and ddp.grad_reduce_in_fp32
    master = 0 if parameter == 4 else 4
    return StateBytes(
        parameter=parameter,
        gradient=4 if is_summed_in_fp32 else parameter,
        optimizer=master + 4 * moments,
        shards=data_parallel if ddp is not None and ddp.use_distributed_optimizer else 1,
    )


def moments_of(args: Any) -> int:
    """Numbers per parameter of the optimizer that Megatron's arguments name; Adam's where they do not say."""
    if getattr(args, "optimizer", "adam") != "sgd":
        return ADAM_MOMENTS
    return int(bool(getattr(args, "sgd_momentum", 0)))
