"""The ``trace`` key: chosen steps as one Chrome/Perfetto file."""

from __future__ import annotations

import atexit
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ext.adapters.deepspeed.report import gather_steps
from ext.config import ExtConfig
from ext.core.errors import ConfigError
from ext.pipeline.chrome import TraceFile
from ext.pipeline.plan import Plan
from ext.pipeline.trace import StepTrace, with_idle
from ext.runtime.guard import FailureGuard

if TYPE_CHECKING:
    from ext.adapters.deepspeed.engine import PlanPipelineEngine

logger = logging.getLogger(__name__)


class Tracer:
    """Gathers each chosen step on rank 0, which writes the file. Of several pipelines, that of rank 0 is traced.

    The file is written whenever the number of its steps has doubled, after the last one, and where the process ends
    before that: a run that ends early leaves its steps too, and a long trace is not written over and over.

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
        self._num_written = 0
        self._plan: Plan | None = None

    @classmethod
    def of(cls, config: ExtConfig, guard: FailureGuard) -> Tracer | None:
        """As the config asks; None where it does not. Collective over the world where it does.

        Raises:
            ConfigError: on all ranks: the file cannot be written.
        """
        if config.trace is None:
            return None
        path = Path(config.trace.path)
        is_first = dist.get_rank() == 0
        guard.agree(_refusal(path) if is_first else None)
        tracer = cls(path, *config.trace.steps)
        if is_first:
            atexit.register(tracer.finish)
        return tracer

    def after_step(self, engine: PlanPipelineEngine, step: int) -> None:
        """Called by all ranks after each training step, with its number."""
        if not self._first <= step <= self._last or engine.grid.stage_to_global(0) != 0:
            return
        gathered = gather_steps(engine, 1)
        if engine.global_rank != 0:
            return
        if self._plan is not None and self._plan.hash != engine.plan.hash:
            logger.info("the plan changed before step %d; its trace starts there", step)
            self._traces, self._num_written = [], 0
        self._plan = engine.plan
        self._traces += [with_idle(trace) for trace, _ in gathered]
        if len(self._traces) >= 2 * self._num_written or step == self._last:
            self._write()

    def finish(self) -> None:
        """Where the process ends: write what is not yet written, or say that there was nothing to trace."""
        if not self._traces:
            logger.warning(
                "ext.trace.steps: no step from %d to %d was made, so %s was not written. The first step of a run is 0; "
                "a resumed run goes on counting.",
                self._first,
                self._last,
                self._path,
            )
        elif len(self._traces) > self._num_written:
            self._write()

    def _write(self) -> None:
        assert self._plan is not None
        self._num_written = len(self._traces)
        try:
            TraceFile("measured", self._plan, tuple(self._traces)).write(self._path)
        except OSError as error:
            # Training is worth more than its picture.
            logger.error("ext.trace.path: %s cannot be written: %s", self._path, error.strerror)
        else:
            steps = ", ".join(str(trace.step) for trace in self._traces)
            logger.info("trace of steps %s: %s", steps, self._path)


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
