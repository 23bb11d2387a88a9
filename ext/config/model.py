"""`ExtConfig`, the one reader of the ``"ext"`` block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field

from ext.config import release
from ext.config.blocks import (
    Block,
    MoeBlock,
    PipelineBlock,
    Positive,
    RecomputeBlock,
    TensorParallelBlock,
    TraceBlock,
    key,
)
from ext.config.problems import Problem, Violations, validate
from ext.config.source import read_ds_config
from ext.core.errors import ConfigError


class ExtConfig(Block):
    """The whole ``"ext"`` block. Every value may also be an object with its name or value as ``type``."""

    enabled: bool = key(True, "False turns the whole block off: nothing of it is read.", "true or false")
    pipeline: PipelineBlock | None = Field(None, description="Pipeline schedule and layout.")
    recompute: RecomputeBlock | None = Field(None, description="Recomputation of activations.")
    tensor_parallel: TensorParallelBlock | None = Field(None, description="Tensor parallelism.")
    moe: MoeBlock | None = Field(None, description="Mixture of experts.")
    trace: TraceBlock | None = Field(None, description="Timeline of chosen steps.")
    watchdog: Positive | None = key(
        None,
        "Seconds without progress after which a run ends by itself.",
        "a number of seconds above 0",
    )
    self_check: bool = key(False, "Compares the first step with the one-process reference.", "true or false")

    @property
    def needs_pipeline_model(self) -> bool:
        """Whether something was asked that a plain nn.Module cannot do."""
        return any(block is not None for block in (self.pipeline, self.recompute, self.tensor_parallel, self.trace))

    @classmethod
    def from_ds_config(cls, config: str | Path | dict[str, Any]) -> ExtConfig | None:
        """The ``"ext"`` block of a ds_config; None without one and with ``"enabled": false``.

        Args:
            config: what DeepSpeed takes: a path, a dictionary, or base64 text of the JSON.

        Raises:
            ConfigError: everything that is wrong with the file or the block, one problem per line.
        """
        ds_config = read_ds_config(config)
        problems = stray_keys(ds_config)
        parsed, of_block = read_block(ds_config.get("ext"))
        return _or_raise(parsed, [*problems, *of_block])

    @classmethod
    def from_block(cls, block: Any, prefix: str = "ext") -> ExtConfig | None:
        """The value of ``"ext"``, as in ``--ext-config`` files; ``prefix`` stands before its keys in messages.

        Raises:
            ConfigError: everything that is wrong with it, one problem per line.
        """
        return _or_raise(*read_block(block, prefix))


def read_block(block: Any, prefix: str = "ext") -> tuple[ExtConfig | None, list[Problem]]:
    """The parsed block, or None where it is absent or turned off, and everything that is wrong with it."""
    if block is None or (isinstance(block, dict) and block.get("enabled") is False):
        return None, []
    try:
        config = validate(ExtConfig, block, elsewhere=release.BUILT)
    except Violations as error:
        return None, error.under(prefix)
    return (config if config.enabled else None), []


def stray_keys(ds_config: dict[str, Any]) -> list[Problem]:
    """Keys outside of ``"ext"`` that can only be meant for it; DeepSpeed would ignore them in silence."""
    meant = {key: _meant(key) for key in ds_config if isinstance(key, str)}
    stock = ds_config.get("pipeline")
    if isinstance(stock, dict) and "schedule" in stock:
        meant["pipeline.schedule"] = "ext.pipeline.schedule"
    return [
        Problem(key, f"unknown key, ignored by DeepSpeed. Did you mean '{name}'?")
        for key, name in meant.items()
        if name
    ]


def _meant(key: str) -> str | None:
    """The key of ours that a top-level ``key`` such as 'Ext', 'exts' or 'ext_pipeline' stands for."""
    words = re.sub(r"\W", "_", key.strip().lower())
    if key != "ext" and words in ("ext", "exts"):
        return "ext"
    keys = (*ExtConfig.model_fields, *release.BUILT)
    return next((f"ext.{path}" for path in keys if words == f"ext_{path.replace('.', '_')}"), None)


def _or_raise(config: ExtConfig | None, problems: list[Problem]) -> ExtConfig | None:
    if problems:
        raise ConfigError(*map(str, problems))
    return config
