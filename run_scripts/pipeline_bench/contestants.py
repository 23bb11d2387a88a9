"""Everybody who runs the same emulated layers: this package, stock DeepSpeed, and torch's own schedules."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

import ext
from ext.adapters.deepspeed.placement import PlacedPipelineModule
from ext.pipeline.actions import Action, Kind
from ext.pipeline.plan import Plan
from ext.pipeline.plan_file import read_plan
from ext.testing.emulated import EmulatedLayer, EmulatedTimes, mean_loss
from pipeline_bench.counted import CountedLayer
from pipeline_bench.runner import WIDTH, Runner, one_f_one_b
from pipeline_bench.setting import DUALPIPEV, OURS, PLANNED, STOCK, TORCH, Contestant, Setting

_TORCH_KINDS = {
    "FORWARD": Kind.F,
    "FULL_BACKWARD": Kind.B,
    "BACKWARD_INPUT": Kind.I,
    "BACKWARD_WEIGHT": Kind.W,
}


def prepare() -> None:
    """What contestants need of a process group. Collective over all ranks."""
    deepspeed.init_distributed("gloo")


def build(contestant: Contestant, setting: Setting, rank: int) -> Runner:
    """Make a contestant on this rank. Collective over all ranks."""
    makers = {OURS: _Ours, PLANNED: _Planned, STOCK: _Stock, DUALPIPEV: _DualPipeV, TORCH: _Torch}
    return makers[contestant.kind](contestant, setting, rank)


class _DeepSpeed(Runner):
    """Any engine that deepspeed.initialize makes."""

    module_class: type[PipelineModule] = PipelineModule
    chunks = 1

    def __init__(self, contestant: Contestant, setting: Setting, rank: int) -> None:
        num_layers = setting.num_ranks * setting.layers_per_rank * self.chunks
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.num_microbatches,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True,
            **self._config(contestant),
        }
        module = self.module_class(
            layers=[self._layer(setting) for _ in range(num_layers)],
            num_stages=setting.num_ranks,
            loss_fn=mean_loss,
            partition_method="uniform",
            **self._module_options(contestant, setting),
            **self._placement(config),
        )
        parameters = list(module.parameters())
        self.engine, *_ = ext.initialize(model=module, model_parameters=parameters, config=config)
        self._data = _endless_data()
        super().__init__(setting, [module], num_layers)

    def step(self) -> None:
        self.engine.train_batch(self._data)

    def _layer(self, setting: Setting) -> LayerSpec:
        times = EmulatedTimes(0, 0, 0)
        if setting.counts_activations:
            return LayerSpec(CountedLayer, times, 1 / setting.layers_per_rank, WIDTH)
        return LayerSpec(EmulatedLayer, times, WIDTH)

    def _placement(self, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _module_options(self, contestant: Contestant, setting: Setting) -> dict[str, Any]:
        return {}

    def _config(self, contestant: Contestant) -> dict[str, Any]:
        return {}


class _Ours(_DeepSpeed):
    def __init__(self, contestant: Contestant, setting: Setting, rank: int) -> None:
        super().__init__(contestant, setting, rank)
        self.plan = self.engine.plan

    def _config(self, contestant: Contestant) -> dict[str, Any]:
        block: dict[str, Any] = {"pipeline": {"schedule": contestant.schedule}}
        if contestant.recompute != "default":
            block["recompute"] = {"policy": contestant.recompute}
        if contestant.trace:
            path = os.path.join(os.environ["EXT_RUN_DIR"], "trace.json")
            block["trace"] = {"path": path, "steps": [0, 10**6]}
        return {"ext": block}


class _Planned(_Ours):
    """Our engine under a plan file, with the layers where the plan has them."""

    module_class = PlacedPipelineModule

    def _config(self, contestant: Contestant) -> dict[str, Any]:
        layers = read_plan(contestant.schedule).layers_per_stage
        schedule = {"type": "plan_file", "path": contestant.schedule}
        return {"ext": {"pipeline": {"schedule": schedule, "partition": list(layers)}}}

    def _placement(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"ds_config": config}


class _Stock(_DeepSpeed):
    def __init__(self, contestant: Contestant, setting: Setting, rank: int) -> None:
        super().__init__(contestant, setting, rank)
        self.plan = one_f_one_b(setting, is_recomputed=contestant.recompute == "full")

    def _module_options(self, contestant: Contestant, setting: Setting) -> dict[str, Any]:
        return {"activation_checkpoint_interval": 1} if contestant.recompute == "full" else {}


class _DualPipeV(_DeepSpeed):
    module_class = DualPipeVModule
    chunks = 2

    def __init__(self, contestant: Contestant, setting: Setting, rank: int) -> None:
        super().__init__(contestant, setting, rank)
        ranks, m = setting.num_ranks, setting.num_microbatches
        orders = []
        for r in range(ranks):
            commands = itertools.chain.from_iterable(DualPipeVSchedule(m, ranks, r))
            passes = [c for c in commands if type(c) in (ForwardPass, BackwardPass)]
            orders.append(tuple(_dualpipev_action(command, r, setting) for command in passes))
        self.plan = _foreign_plan(contestant, setting, orders, num_stages=2 * ranks)


class _Torch(Runner):
    """torch.distributed.pipelining on the world's own group."""

    def __init__(self, contestant: Contestant, setting: Setting, rank: int) -> None:
        schedule_class: Any = getattr(torch_schedules, contestant.schedule)
        ranks, m = setting.num_ranks, setting.num_microbatches
        is_single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
        mirrored = getattr(schedule_class, "__name__", "").startswith(("ScheduleZBV", "ScheduleDualPipeV"))
        num_stages = ranks if is_single else 2 * ranks
        own = [rank] if is_single else [rank, num_stages - 1 - rank if mirrored else rank + ranks]
        layers = setting.layers_per_rank
        chunks = [nn.Sequential(*(EmulatedLayer(EmulatedTimes(0, 0, 0), WIDTH) for _ in range(layers))) for _ in own]
        stages = [_torch_stage(chunk, stage, num_stages) for chunk, stage in zip(chunks, own, strict=True)]
        self._schedule = schedule_class(
            stages[0] if is_single else stages, n_microbatches=m, loss_fn=lambda outputs, labels: outputs.mean()
        )
        self._inputs = (torch.ones(m, WIDTH),) if rank == 0 else ()
        self._is_last = num_stages - 1 in own
        self._labels = torch.zeros(m, 1)
        super().__init__(setting, chunks, num_stages * layers)
        if is_single:
            self.plan = one_f_one_b(setting, is_recomputed=False)
        else:
            orders = [_torch_actions(self._schedule.pipeline_order[r]) for r in range(ranks)]
            self.plan = _foreign_plan(contestant, setting, orders, num_stages)

    def step(self) -> None:
        more = {"target": self._labels, "losses": []} if self._is_last else {}
        self._schedule.step(*self._inputs, **more)
        for module in self._modules:
            module.zero_grad()


def _torch_stage(chunk: nn.Module, stage: int, num_stages: int) -> pipelining.PipelineStage:
    example = torch.ones(1, WIDTH)
    given, made = example.clone().requires_grad_(stage > 0), example.clone().requires_grad_()
    return pipelining.PipelineStage(
        chunk, stage, num_stages, torch.device("cpu"), input_args=(given,), output_args=(made,)
    )


def _torch_actions(actions: Sequence[Any]) -> tuple[Action, ...]:
    return tuple(
        Action(action.stage_index, _TORCH_KINDS[action.computation_type.name], action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type.name in _TORCH_KINDS
    )


def _dualpipev_action(command: Any, rank: int, setting: Setting) -> Action:
    stage = rank if command.phase == 0 else 2 * setting.num_ranks - 1 - rank
    microbatch = command.buffer_id % setting.num_microbatches
    return Action(stage, Kind.F if type(command) is ForwardPass else Kind.B, microbatch)


def _foreign_plan(
    contestant: Contestant, setting: Setting, orders: Sequence[tuple[Action, ...]], num_stages: int
) -> Plan:
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    return Plan(
        schedule=contestant.schedule,
        num_microbatches=setting.num_microbatches,
        rank_of=tuple(rank_of[stage] for stage in range(num_stages)),
        orders=tuple(orders),
        layers_per_stage=(setting.layers_per_rank,) * num_stages,
        recomputed_layers=(0,) * num_stages,
    )


def _endless_data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(1, WIDTH), torch.zeros(1)
