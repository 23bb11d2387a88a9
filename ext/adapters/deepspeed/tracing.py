"""The ``trace`` key: chosen steps as one Chrome/Perfetto file."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ext.adapters.deepspeed.report import gather_steps
from ext.config import ExtConfig
from ext.core.errors import ConfigError
from ext.pipeline.chrome import TraceFile
from ext.pipeline.trace import StepTrace, with_idle
from ext.runtime.guard import FailureGuard

if TYPE_CHECKING:
    from ext.adapters.deepspeed.engine import PlanPipelineEngine

logger = logging.getLogger(__name__)


class Tracer:
    """Gathers each chosen step on rank 0, which writes the file again with one step more.

    A run that ends early so leaves the steps it made. Of several pipelines, that of rank 0 is traced.

    Args:
        path: the file.
        first: number of the first traced step; the first step of a run is 0.
        last: number of the last traced step.
    """

    def __init__(self, path: Path, first: int, last: int) -> None:
        self._path = path
        self._first = first
        self._last = last
        self._traces: list[StepTrace] = []

    @classmethod
    def of(cls, config: ExtConfig, guard: FailureGuard) -> Tracer | None:
        """As the config asks; None where it does not. Collective over the world where it does.

        Raises:
            ConfigError: on all ranks: the file cannot be written.
        """
        if config.trace is None:
            return None
        path = Path(config.trace.path)
        guard.agree(_refusal(path) if dist.get_rank() == 0 else None)
        return cls(path, *config.trace.steps)

    def after_step(self, engine: PlanPipelineEngine, step: int) -> None:
        """Called by all ranks after each training step, with its number."""
        if not self._first <= step <= self._last or engine.grid.stage_to_global(0) != 0:
            return
        self._traces += [with_idle(trace) for trace, _ in gather_steps(engine, 1)]
        if engine.global_rank != 0:
            return
        try:
            TraceFile("measured", engine.plan, tuple(self._traces)).write(self._path)
        except OSError as error:
            # Training is worth more than its picture.
            logger.error("ext.trace.path: %s cannot be written: %s", self._path, error.strerror)
        else:
            if step == self._last:
                logger.info("trace of steps %d to %d: %s", self._first, self._last, self._path)


def _refusal(path: Path) -> ConfigError | None:
    """Why a file cannot be written, found out by writing beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return ConfigError(f"ext.trace.path: {path} cannot be written: {error.strerror}. Name another file.")
