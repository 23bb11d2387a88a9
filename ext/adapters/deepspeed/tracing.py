"""The ``trace`` key on DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ext.config import ExtConfig
from ext.runtime import tracing
from ext.runtime.guard import FailureGuard

if TYPE_CHECKING:
    from ext.adapters.deepspeed.engine import PlanPipelineEngine


class Tracer(tracing.Tracer):
    """Traces an engine's steps."""

    @classmethod
    def of(cls, config: ExtConfig, guard: FailureGuard) -> Tracer | None:
        """As the config asks; None where it does not. Collective over the world where it does.

        Raises:
            ConfigError: on all ranks: the file cannot be written.
        """
        return None if config.trace is None else cls.opened(config.trace.path, config.trace.steps, guard)

    def after_step(self, engine: PlanPipelineEngine, step: int) -> None:
        """Called by all ranks after each training step, with its number."""
        if self.wants(step) and engine.grid.stage_to_global(0) == 0:
            group = engine.grid.get_pipe_parallel_group()
            self.add(step, engine.plan, engine.recorder, group, engine.num_stages)
