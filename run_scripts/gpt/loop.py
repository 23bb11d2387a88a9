"""The training loop: steps, evaluations, checkpoints, progress."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ext.adapters.deepspeed.engine import PlanPipelineEngine
from ext.adapters.deepspeed.report import StepReport, measure
from ext.core.errors import ExtError
from gpt import device
from gpt.checkpoint import Checkpoints
from gpt.report import JsonLog, Progress, median
from gpt.sampling import Sampler
from gpt.together import StopSignal

logger = logging.getLogger(__name__)

NUM_WARMUP_STEPS = 2
"""Steps that do not count for the measured step time."""


@dataclass(frozen=True)
class Rhythm:
    """How long to train, and how many steps lie between the other things; 0 is never."""

    num_steps: int
    log_every: int
    eval_every: int
    save_every: int


@dataclass
class History:
    """What happened so far in this process."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    checkpoint: Path | None = None

    @property
    def step_time_s(self) -> float | None:
        """Median of the steps behind the first few, which allocate and connect."""
        return median(self.step_times_s[NUM_WARMUP_STEPS:])


class Trainer:
    """Runs the steps. Everything here is collective over all ranks; rank 0 logs.

    Args:
        engine: DeepSpeed's pipeline engine.
        train: the samples to train on.
        validation: the samples of every evaluation; their shape says how many micro-batches one takes.
        checkpoints: where states go.
        rhythm: how often what happens.
        log: for rank 0's progress.
        plan_hash: what goes into each line of the log.
    """

    def __init__(
        self,
        engine: Any,
        train: Sampler,
        validation: Sampler,
        checkpoints: Checkpoints,
        rhythm: Rhythm,
        log: JsonLog,
        plan_hash: str | None,
    ) -> None:
        self._engine = engine
        self._train = train
        self._validation = validation
        self._checkpoints = checkpoints
        self._rhythm = rhythm
        self._log = log
        self._plan_hash = plan_hash
        self.history = History()

    def run(self, start: int, stop: StopSignal) -> int:
        """Train from step `start` until the last one, or until a signal asks to stop.

        Returns:
            The number of the signal, 0 if there was none.

        Raises:
            CheckpointError: a checkpoint could not be written.
            ExtError: the loss is not a number any more.
        """
        rhythm, history = self._rhythm, self.history
        if start == 0 and rhythm.eval_every:
            logger.info("before training: validation loss %.4f", self._evaluate(0))
        began = time.perf_counter()
        signum, unlogged = 0, 0
        for step in range(start + 1, rhythm.num_steps + 1):
            step_began = time.perf_counter()
            loss = self._engine.train_batch(self._train.batches(step - 1))
            signum = stop.agreed()  # waits for the device too, so that the time is that of the step
            history.step_times_s.append(time.perf_counter() - step_began)
            unlogged += 1
            is_last = bool(signum) or step == rhythm.num_steps
            evaluates = bool(rhythm.eval_every) and (step % rhythm.eval_every == 0 or is_last and not signum)
            if step % rhythm.log_every == 0 or evaluates or is_last or not history.losses:
                history.losses.append((step, _finite(loss, step)))
                validation_loss = self._evaluate(step) if evaluates else None
                elapsed = time.perf_counter() - began
                remaining_s = elapsed / (step - start) * (rhythm.num_steps - step)
                self._report(step, validation_loss, unlogged, remaining_s)
                unlogged = 0
            if rhythm.save_every and (step % rhythm.save_every == 0 or is_last):
                history.checkpoint = self._checkpoints.save(step)
            if signum:
                break
        return signum

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together, at the median step time."""
        step_time_s = self.history.step_time_s
        return None if step_time_s is None else self._train.shape.tokens_per_step / step_time_s

    def figures(self, num_steps: int = 4) -> StepReport | None:
        """Times and bubbles of the last steps, measured and simulated; None of DeepSpeed's own engine. Collective."""
        return measure(self._engine, num_steps) if isinstance(self._engine, PlanPipelineEngine) else None

    def memory_gib(self) -> tuple[float, ...]:
        """Peak memory of each stage, the largest over its replicas. Collective over all ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._engine.stage_id, device.peak_memory_bytes()))
        return tuple(
            max(size for owner, size in everyone if owner == stage) / 2**30 for stage in range(self._engine.num_stages)
        )

    def _evaluate(self, step: int) -> float:
        shape = self._validation.shape
        loss = self._engine.eval_batch(self._validation.batches(0), num_micro_batches=shape.num_microbatches)
        value = float(loss)
        self.history.validation_losses.append((step, value))
        return value

    def _report(self, step: int, validation_loss: float | None, num_steps: int, remaining_s: float) -> None:
        memory = self.memory_gib()
        figures = self.figures()
        step_time_s = sum(self.history.step_times_s[-num_steps:]) / num_steps
        progress = Progress(
            step=step,
            loss=self.history.losses[-1][1],
            validation_loss=validation_loss,
            tokens_per_s=self._train.shape.tokens_per_step / step_time_s,
            learning_rate=self._engine.get_lr()[0],
            step_time_s=step_time_s,
            bubble=None if figures is None else figures.bubble,
            memory_gib=memory,
            plan_hash=self._plan_hash,
        )
        logger.info("%s", progress.line(self._rhythm.num_steps, remaining_s))
        self._log.write(progress)
        if self._engine.monitor.enabled:
            self._engine.monitor.write_events(progress.events(self._engine.global_samples))


def _finite(loss: Any, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise ExtError(
            f"the loss of step {step} is {value}. Lower the learning rate, lengthen --warmup-steps or clip gradients, "
            f"and --resume the last checkpoint."
        )
    return value
