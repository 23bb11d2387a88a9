"""Emulated layers in Megatron's own TransformerBlock: its 1F1B and recomputation, and this package's plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ext.adapters.megatron import testing  # first: it installs what megatron.core needs on CPUs
from ext.adapters.megatron.schedule import PlanForwardBackward

from megatron.core import parallel_state  # isort: skip
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.enums import ModelType  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_layer import BaseTransformerLayer  # isort: skip

from ext.config import ExtConfig
from ext.testing.emulated import EmulatedLayer, EmulatedTimes
from pipeline_bench.runner import WIDTH, Runner, one_f_one_b
from pipeline_bench.setting import OURS, PLANNED, STOCK, Contestant, Setting


def prepare() -> None:
    """What contestants need of a process group. Collective over all ranks."""
    testing.parallel(pp=dist.get_world_size())


def build(contestant: Contestant, setting: Setting, rank: int) -> Runner:
    """Make a contestant on this rank. Collective over all ranks."""
    return _Megatron(contestant, setting)


class EmulatedTransformerLayer(MegatronModule, BaseTransformerLayer):
    """A layer of a TransformerBlock that waits instead of computing."""

    def __init__(self, config: Any, layer_number: int = 1, **_: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number + parallel_state.get_pipeline_model_parallel_rank() * (
            config.num_layers // config.pipeline_model_parallel_size
        )
        self.emulated = EmulatedLayer(EmulatedTimes(0, 0, 0), WIDTH)

    def forward(self, hidden_states: Tensor, *_: Any, context: Any = None, **__: Any) -> tuple[Tensor, Any]:
        return self.emulated(hidden_states), context


class EmulatedModel(MegatronModule):
    """One stage: a TransformerBlock of emulated layers."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        count = config.num_layers // config.pipeline_model_parallel_size
        layers = [ModuleSpec(module=EmulatedTransformerLayer)] * count
        self.decoder = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=layers),
            post_layer_norm=False,
            pre_process=is_first,
            post_process=is_last,
        )

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        """Megatron hands a stage its inputs so."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(hidden_states=hidden_states, attention_mask=None)


class _Megatron(Runner):
    """Megatron's own schedule, or ours in its place."""

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        recompute: dict[str, Any] = {}
        is_stock = contestant.kind == STOCK
        if is_stock and contestant.recompute == "full":
            recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        config = TransformerConfig(
            num_layers=setting.num_ranks * setting.layers_per_rank,
            hidden_size=WIDTH,
            num_attention_heads=1,
            pipeline_model_parallel_size=setting.num_ranks,
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True,
            **recompute,
        )
        self._model = DistributedDataParallel(config, DistributedDataParallelConfig(), EmulatedModel(config))
        # As an embedding's outputs: Megatron's checkpointing leaves a first stage without gradients out altogether.
        self._data = itertools.repeat(torch.ones(1, 1, WIDTH, requires_grad=True))
        self._function: Callable[..., Any] = get_forward_backward_func() if is_stock else _ours(contestant)
        self._num_microbatches = setting.num_microbatches
        super().__init__(setting, [self._model], setting.num_ranks * setting.layers_per_rank)
        if isinstance(self._function, PlanForwardBackward):
            self.step()  # a search measures the layers at their full times
            assert self._function.plan is not None
            self.plan = self._function.plan
        else:
            self.plan = one_f_one_b(setting, is_recomputed=contestant.recompute == "full")

    def step(self) -> None:
        self._model.zero_grad_buffer()
        self._function(
            forward_step_func=_forward_step,
            data_iterator=self._data,
            model=[self._model],
            num_microbatches=self._num_microbatches,
            seq_length=1,
            micro_batch_size=1,
        )


def _ours(contestant: Contestant) -> PlanForwardBackward:
    schedule: Any = contestant.schedule
    if contestant.kind == PLANNED:
        schedule = {"type": "plan_file", "path": contestant.schedule}
    elif schedule == "auto":
        schedule = {"type": "auto", "search_seconds": 1.0}
    block: dict[str, Any] = {"pipeline": {"schedule": schedule, "tolerance": 0.0}}
    assert contestant.kind in (OURS, PLANNED)
    if contestant.recompute != "default":
        block["recompute"] = {"policy": contestant.recompute}
    config = ExtConfig.from_block(block)
    assert config is not None
    return PlanForwardBackward(config)


def _forward_step(data: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    return model(next(data)), _loss


def _loss(outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return outputs.mean(), {}
