"""What every contestant's part on one rank has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import nn

from ext.pipeline.build import build_plan
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.schedule import SCHEDULES
from ext.testing.emulated import EmulatedTimes, emulate
from pipeline_bench.counted import share_meter
from pipeline_bench.setting import Setting

WIDTH = 8
WARMUP_SHARE = 0.02
"""Steps that warm up take this share of the setting's times."""


class Runner(ABC):
    """One rank's part of a contestant.

    Attributes:
        plan: the order that it runs, for the simulator.
    """

    plan: Plan

    def __init__(self, setting: Setting, modules: Sequence[nn.Module], num_layers: int) -> None:
        share = setting.num_ranks / num_layers
        self._modules = modules
        self._meters = [share_meter(module) for module in modules] if setting.counts_activations else []
        self._times = EmulatedTimes(
            setting.forward * share, setting.input_grad * share, setting.weight_grad * share, setting.recompute * share
        )
        self.pace(1.0)

    def pace(self, share: float) -> None:
        """Let the layers take this share of their times."""
        for module in self._modules:
            emulate(module, self._times.scaled(share))

    @abstractmethod
    def step(self) -> None:
        """One training step. Collective over all ranks."""

    def peak_activations(self) -> float | None:
        """Most activations that this rank's layers held so far; None where they do not count."""
        return max((meter.peak for meter in self._meters), default=None)


def one_f_one_b(setting: Setting, *, is_recomputed: bool) -> Plan:
    """The order that stock DeepSpeed and torch's 1F1B run."""
    layers = (setting.layers_per_rank,) * setting.num_ranks
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(setting.num_ranks, setting.num_microbatches))
    recomputed = layers if is_recomputed else (0,) * setting.num_ranks
    return build_plan(schedule, layers_per_stage=layers, recomputed_layers=recomputed)
