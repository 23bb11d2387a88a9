"""Pipeline modules whose layers are placed by ``ext.pipeline.partition``, and the proof that none was lost."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from ext.adapters.deepspeed.devices import num_shared_devices
from ext.adapters.deepspeed.layers import eligible, names_of
from ext.adapters.deepspeed.specs import count_parameters, profile_specs
from ext.config import ExtConfig
from ext.config.blocks import Partition
from ext.config.check import Launch, microbatches_per_step
from ext.config.decide import allowed_counts, budgets_in_bytes, make_schedule, place_by_search
from ext.config.release import PER_STAGE
from ext.config.source import read_ds_config
from ext.config.states import precision, state_bytes
from ext.core.errors import ConfigError, ExtError
from ext.pipeline.memory_table import amount
from ext.pipeline.partition import Bounds, listed_bounds, recompute_aware, uniform_bounds
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedules.auto import Auto

KEY = "ext.pipeline.partition"
AUTO = "auto"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PlacedPipelineModule(PipelineModule):
    """A PipelineModule whose stages begin where the ``"ext"`` block of a ds_config says.

    Collective over the world, like its base class. Arguments are those of PipelineModule and

    Args:
        ds_config: the whole ds_config; None where the class has one.
        sample_batch: inputs and labels of one micro-batch, for a partition that measures the layers.

    Raises:
        ConfigError: on every rank: the layers cannot be placed so.
    """

    ds_config: ClassVar[dict[str, Any] | None] = None
    """Of all modules of this class, for scripts that do not give it themselves."""

    def __init__(
        self, *args: Any, ds_config: dict[str, Any] | None = None, sample_batch: Any = None, **kwargs: Any
    ) -> None:
        self._source = type(self).ds_config if ds_config is None else ds_config, sample_batch
        super().__init__(*args, **kwargs)
        if self._places_layers():
            check_built(self)
        del self._source  # The sample is not kept.

    def _places_layers(self) -> bool:
        return _places_layers(self.placed_by, self._source[1])

    def _partition_layers(self, method: str = "uniform") -> None:
        ds_config, sample_batch = self._source
        config = None if ds_config is None else ExtConfig.from_ds_config(ds_config)
        self.placed_by = partition_of(config)
        if config is None or ds_config is None or not self._places_layers():
            super()._partition_layers(method)
            return
        try:
            self.parts = list(_bounds(self, config, ds_config, sample_batch))
        except ConfigError as error:
            raise ConfigError(*(f"{KEY}: {problem}" for problem in error.problems)) from None
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])

    def _build(self) -> None:
        """As the host's; a layer that one stage cannot build is the same error on every rank."""
        failure: Exception | None = None
        try:
            super()._build()
        except Exception as error:  # noqa: BLE001 - raised again, on every rank
            failure = error
        story = None
        if failure is not None:
            index = (self._local_start or 0) + len(self.forward_funcs)
            kind = "" if isinstance(failure, AssertionError) else f"{type(failure).__name__}: "
            story = f"layer {index} ({names_of(self._layer_specs)[index]}) cannot be built: {kind}{failure}"
        everyone: list[str | None] = [None] * self.world_size
        dist.all_gather_object(everyone, story)
        if any(everyone):
            raise ConfigError(*dict.fromkeys(filter(None, everyone))) from failure


class ScriptPipelineModule(PlacedPipelineModule):
    """What a script that runs under ``ext.run`` builds where it says PipelineModule; ``ext.run`` sets `ds_config`."""


def pipeline_module(layers: Any, *, config: Any, sample_batch: Any = None, **kwargs: Any) -> PipelineModule:
    """See `ext.pipeline_module`."""
    ds_config = read_ds_config(config)
    partition = partition_of(ExtConfig.from_ds_config(ds_config))
    if _places_layers(partition, sample_batch) and "partition_method" in kwargs:
        raise ConfigError(
            f"{KEY}: '{partition.type}' and partition_method={kwargs['partition_method']!r} both place the layers. "
            "Remove one of them."
        )
    return PlacedPipelineModule(layers, ds_config=ds_config, sample_batch=sample_batch, **kwargs)


def partition_of(config: ExtConfig | None) -> Partition:
    """The configured partition; that of the module where the config says nothing."""
    return Partition() if config is None or config.pipeline is None else config.pipeline.partition


def _places_layers(partition: Partition, sample_batch: Any) -> bool:
    """Whether a partition decides; 'auto' takes what it can have: without a sample the layers stay with the host."""
    return partition.places_layers or (partition.type == AUTO and sample_batch is not None)


def placement_problem(module: PipelineModule, config: ExtConfig) -> str | None:
    """Why a module that is built already cannot have the configured partition; None where it can or has it."""
    partition = partition_of(config)
    if not partition.places_layers or getattr(module, "placed_by", None) == partition:
        return None
    return (
        f"{KEY}: '{partition.type}' places layers while the module is built, and this one was built before; it is "
        "never taken apart again. Build it with ext.pipeline_module(layers=..., config=..., num_stages=..., "
        "loss_fn=...), run the script under ext.run, or remove the key."
    )


def check_built(module: PipelineModule) -> None:
    """Every layer is built on exactly one stage, with as many parameters as its spec asks for.

    Collective over the pipeline of this rank.

    Raises:
        ConfigError: on every rank of the pipeline: layers or parameters are missing or too many.
    """
    specs = module._layer_specs
    mine = module.stage_id, module._local_start, module._local_stop, sum(p.numel() for p in module.parameters())
    stages: list[Any] = [None] * module._topo.get_dim("pipe")
    dist.all_gather_object(stages, mine, group=module._grid.get_pipe_parallel_group())
    stages.sort()
    problems = []
    if [0, *(stop for _, _, stop, _ in stages)] != [*(start for _, start, _, _ in stages), len(specs)]:
        held = ", ".join(f"stage {stage} holds {start} to {stop - 1}" for stage, start, stop, _ in stages)
        problems.append(f"the stages do not hold each of the {len(specs)} layers once: {held}.")
    for stage, start, stop, found in stages:
        planned = count_parameters(specs[start:stop])
        if planned is not None and planned != found:
            problems.append(
                f"stage {stage} was built with {found:,} parameters, its layers {start} to {stop - 1} have "
                f"{planned:,}. A layer builds something else than its spec says."
            )
    if problems:
        raise ConfigError(*problems)


def _bounds(module: PlacedPipelineModule, config: ExtConfig, ds_config: dict[str, Any], sample_batch: Any) -> Bounds:
    partition, num_stages = module.placed_by, module._topo.get_dim("pipe")
    names = names_of(module._layer_specs)
    if partition.type == "uniform":
        return uniform_bounds(names, num_stages)
    if partition.type == PER_STAGE:
        assert partition.layers is not None
        if len(partition.layers) != num_stages:
            raise ConfigError(f"{len(partition.layers)} numbers given, the pipeline has {num_stages} stages.")
        return listed_bounds(partition.layers, names)
    shared_by = module._grid.get_slice_parallel_world_size()
    if shared_by > 1:
        raise ConfigError(
            f"'{partition.type}' measures the layers on one rank, which cannot run layers that {shared_by} "
            "tensor-parallel ranks share. Place them with 'module', 'uniform' or a list."
        )
    if sample_batch is None:
        raise ConfigError(
            f"'{partition.type}' measures the layers before it places them, on a micro-batch that was not given. "
            "Give ext.pipeline_module(..., sample_batch=(inputs, labels)), or place them with 'uniform' or a list."
        )
    return _measured_bounds(module, config, ds_config, sample_batch)


def _measured_bounds(
    module: PlacedPipelineModule, config: ExtConfig, ds_config: dict[str, Any], sample_batch: Any
) -> Bounds:
    """Global rank 0 measures and decides, all take its bounds or its error."""
    outcome: list[Any] = [None]
    if module.global_rank == 0:
        try:
            outcome = [_search(module, config, ds_config, sample_batch)]
        except ExtError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ExtError):
        raise outcome[0]
    return outcome[0]


def _search(module: PlacedPipelineModule, config: ExtConfig, ds_config: dict[str, Any], sample_batch: Any) -> Bounds:
    num_stages, replicas = module._topo.get_dim("pipe"), module._grid.data_parallel_size
    num_microbatches = microbatches_per_step(ds_config, Launch(module.world_size, num_stages))
    schedule = make_schedule(config, PipelineShape(num_stages, num_microbatches or 1))
    layers, loss = profile_specs(
        module._layer_specs,
        eligible(module._layer_specs, module.checkpointable_layers),
        module.loss_fn,
        sample_batch,
        DTYPES[precision(ds_config)],
    )
    device: Any = get_accelerator()
    device_bytes = None if device.device_name() == "cpu" else device.total_memory()
    budgets = budgets_in_bytes(config, num_stages, device_bytes) or [math.inf] * num_stages
    states = state_bytes(ds_config, replicas)
    if module.placed_by.type == AUTO and isinstance(schedule, Auto):
        start = uniform_bounds(names_of(module._layer_specs), num_stages)
        devices = num_shared_devices(num_stages)
        return place_by_search(config, schedule, layers, loss, states, budgets, start, devices)
    allowed = allowed_counts(config, schedule)
    return recompute_aware(schedule, layers, loss, states, budgets, allowed=allowed, show=amount).bounds
