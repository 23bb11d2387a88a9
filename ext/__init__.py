"""Pipeline schedules, recomputation and MoE dispatch for DeepSpeed and Megatron-core."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "describe", "initialize"]


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """A drop-in for ``deepspeed.initialize``: same arguments, same results.

    Where ds_config has an ``"ext"`` block, the engine it returns obeys it; without one this is stock DeepSpeed.
    Collective over all ranks, like the original.

    Returns:
        engine, optimizer, data loader, learning-rate scheduler.

    Raises:
        ConfigError: on every rank alike and before any collective of ours: all that cannot work.
    """
    from ext.adapters.deepspeed.initialize import initialize

    return initialize(*args, **kwargs)


def describe(engine: Any) -> dict[str, Any]:
    """What is active in an engine that `initialize` returned.

    Returns:
        ``active``, ``schedule``, ``policy``, ``partition`` (type and layers per stage), ``dispatcher``,
        ``plan_hash``, ``orders`` (rank as string -> actions as text, without communication) and ``recomputes``
        (stage as string -> layers that this rank re-ran in its last training step). Local: any rank may call it.
    """
    from ext.adapters.deepspeed.initialize import describe

    return describe(engine)
