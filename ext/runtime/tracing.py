"""The ``trace`` key: chosen steps of rank 0's pipeline as one Chrome/Perfetto file."""

from __future__ import annotations

import atexit
import logging
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ext.core.errors import ConfigError
from ext.pipeline.chrome import TraceFile
from ext.pipeline.plan import Plan
from ext.pipeline.trace import StepTrace, with_idle
from ext.runtime.guard import FailureGuard
from ext.runtime.recorder import RecordedStep, Recorder

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="Tracer")


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
    def opened(cls: type[T], path: str, steps: tuple[int, int], guard: FailureGuard) -> T:
        """A tracer whose file can be written. Collective over the world.

        Raises:
            ConfigError: on all ranks: it cannot.
        """
        is_first = dist.get_rank() == 0
        guard.agree(_refusal(Path(path)) if is_first else None)
        tracer = cls(Path(path), *steps)
        if is_first:
            atexit.register(tracer.finish)
        return tracer

    def wants(self, step: int) -> bool:
        """Whether a step is one of the chosen."""
        return self._first <= step <= self._last

    def add(self, step: int, plan: Plan, recorder: Recorder, group: Any, num_ranks: int) -> None:
        """Take a step that was recorded last. Collective over the pipeline of global rank 0; others do not call.

        Args:
            step: its number.
            plan: what ran.
            recorder: of this rank.
            group: the pipeline's ranks.
            num_ranks: how many these are.
        """
        gathered = gather_steps(recorder, 1, group, num_ranks)
        if dist.get_rank() != 0:
            return
        if self._plan is not None and self._plan.hash != plan.hash:
            logger.info("the plan changed before step %d; its trace starts there", step)
            self._traces, self._num_written = [], 0
        self._plan = plan
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


def gather_steps(recorder: Recorder, num_steps: int, group: Any, num_ranks: int) -> list[tuple[StepTrace, float]]:
    """The last recorded steps of a pipeline's ranks, each with its whole time in seconds. Collective over ``group``."""
    mine = recorder.recorded(num_steps)
    everyone: list[list[RecordedStep]] = [mine] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(everyone, mine, group=group)
    steps = []
    for ranks in zip(*everyone, strict=True):
        whole = max(step.end for step in ranks) - min(step.start for step in ranks)
        rows = tuple(tuple(sorted(step.spans, key=lambda span: span.start)) for step in ranks)
        steps.append((StepTrace(ranks[0].step, rows), whole))
    return steps


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
