"""What looks on while the steps of a model run: for hangs, errors of other ranks, memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ext.adapters.megatron.memory import MemoryWatch
from ext.adapters.megatron.planning import Plans
from ext.config import ExtConfig
from ext.pipeline.plan import Plan
from ext.runtime.alarm import Alarm
from ext.runtime.recorder import Recorder, clock_for
from ext.runtime.tracing import Tracer
from ext.runtime.watchdog import Watchdog


@dataclass(frozen=True)
class Watches:
    """One set for a model.

    Attributes:
        watchdog: ends a run that is stuck.
        memory: counts the first step.
        recorder: of actions, in traced steps.
        tracer: writes these; None where nobody asked.
    """

    watchdog: Watchdog
    memory: MemoryWatch
    recorder: Recorder
    tracer: Tracer | None

    @classmethod
    def of(cls, config: ExtConfig, plans: Plans, model: nn.Module, host_config: Any, groups: Any) -> Watches:
        """As the config asks. Collective over the world.

        Raises:
            ConfigError: on all ranks: the file of a trace cannot be written.
        """
        if max(groups.tp.size(), groups.cp.size(), host_config.expert_model_parallel_size) > 1:
            # Ranks wait for each other inside a step, where only the alarm reaches them.
            plans.guard.alarm = Alarm.shared()
        trace = config.trace
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(
            Watchdog(config.watchdog),
            MemoryWatch(plans, model, host_config, groups.pp),
            Recorder(clock_for(device)),
            None if trace is None else plans.as_typed(lambda: Tracer.opened(trace.path, trace.steps, plans.guard)),
        )

    @contextmanager
    def traced(self, number: int, plan: Plan, group: Any) -> Iterator[None]:
        """Around a training step: one of the chosen is recorded and gathered. Collective over the pipeline.

        Args:
            number: of the step.
            plan: that it runs.
            group: the pipeline's ranks; the one of global rank 0 is traced.
        """
        if self.tracer is None or not self.tracer.wants(number):
            yield
            return
        with self.recorder.step(number):
            yield
        if dist.get_global_rank(group, 0) == 0:
            self.tracer.add(number, plan, self.recorder, group, plan.num_ranks)
