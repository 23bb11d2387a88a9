"""A forward-backward function for megatron-core that runs plans; called like the host's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn

from ext.adapters.megatron import arguments, check, limits, resolve
from ext.adapters.megatron.grad_sync import GradSync
from ext.adapters.megatron.layers import transformer_layers
from ext.adapters.megatron.linear import make_deferrable, undeferrable_layers
from ext.adapters.megatron.step import Call, Step
from ext.adapters.megatron.support import unsupported
from ext.config import ExtConfig
from ext.core.errors import ConfigError, DataError
from ext.runtime.channels import Links
from ext.runtime.guard import FailureGuard


class PlanForwardBackward:
    """Runs the plan that ``config`` asks for; see ``megatron.core``'s ``get_forward_backward_func``.

    Collective over the pipeline's ranks, and in its first call over the world. One object serves one model: training
    and evaluation, with any number of micro-batches.

    Args:
        config: pipeline and recompute settings.
        name: how a dotted key is called in errors, for settings that came from flags.
    """

    def __init__(self, config: ExtConfig, name: Callable[[str], str] = "ext.{}".format) -> None:
        check.raise_if_any(unsupported(config, tuple(flag.path for flag in arguments.flags()), name))
        self.config = config
        self.recomputes: dict[int, int] = {}
        self._name = name
        self._resolutions: dict[int, resolve.Resolution] = {}
        self._layers_per_stage: list[int] | None = None
        self._links: Links | None = None
        self._guard: FailureGuard | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """What the host's function returns: the reduced losses on the last stage, else an empty list.

        Shapes travel with the messages, so ``seq_length`` and its like and ``adjust_tensor_shapes_fn`` do nothing.

        Raises:
            ConfigError: schedule, policy and model do not fit, or the host's config asks for what cannot go with them.
            DataError: the data iterator ended too early, or gave another shape than the step's first micro-batch
                without ``variable_seq_lengths``.
            CommunicationError: another rank failed.
        """
        chunk: nn.Module = _only(model, "model")
        data_iterator = _only(data_iterator, "data_iterator")
        groups = _groups() if pg_collection is None else pg_collection
        host_config = get_model_config(chunk)
        self._prepare(chunk, host_config, groups, num_microbatches, forward_only)
        rank = dist.get_group_rank(groups.pp, dist.get_rank())
        plan = self._resolutions[num_microbatches].plan if not forward_only else self._forward_plan(num_microbatches)
        call = Call(
            forward_step_func, data_iterator, chunk, host_config, num_microbatches, groups.cp.size(), forward_only,
            collect_non_loss_data, first_val_step,
        )  # fmt: skip
        sync = GradSync(host_config, chunk, rank, may_start_early=not plan.split_backwards)
        assert self._links is not None
        step = Step(call, plan, rank, self._links, transformer_layers(chunk), sync)
        if host_config.timers is not None:
            host_config.timers("forward-backward", log_level=1).start(barrier=host_config.barrier_with_L1_time)
        self._run(step)
        if not forward_only:
            sync.finish()
            self.recomputes = dict.fromkeys(plan.stages_of(rank), step.num_reruns)
            if host_config.finalize_model_grads_func is not None:
                num_tokens = step.num_tokens if host_config.calculate_per_token_loss else None
                host_config.finalize_model_grads_func(
                    [chunk], num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce
                )
        if host_config.timers is not None:
            host_config.timers("forward-backward").stop()
        return step.store

    def describe(self) -> dict[str, Any]:
        """What is active, as `ext.describe` tells it of a DeepSpeed engine; empty values before the first step."""
        resolution = next(iter(self._resolutions.values()), None)
        plan = None if resolution is None else resolution.plan
        return {
            "active": True,
            "schedule": plan and plan.schedule,
            "policy": resolution and resolution.policy,
            "partition": {"type": "module", "layers_per_stage": self._layers_per_stage},
            "dispatcher": None if self.config.moe is None else self.config.moe.dispatcher.type,
            "plan_hash": plan and plan.hash,
            "orders": {} if plan is None else dict(plan.to_json()),
            "recomputes": {str(stage): count for stage, count in self.recomputes.items()},
        }

    def _prepare(self, model: nn.Module, host_config: Any, groups: Any, num_microbatches: int, only: bool) -> None:
        """Everything that a call needs and an earlier one may have made."""
        if self._layers_per_stage is None:
            self._layers_per_stage = _count_layers(model, host_config, groups)
            if groups.cp.size() == groups.tp.size() == host_config.expert_model_parallel_size == 1:
                # Elsewhere ranks wait for each other inside a step; one that failed would wait for them in vain.
                self._guard = FailureGuard()
        if not only and num_microbatches not in self._resolutions:
            resolution = resolve.resolve(self.config, self._layers_per_stage, num_microbatches)
            splits = bool(resolution.plan.split_backwards)
            recomputes = limits.recomputing_key(
                self.config.recompute is not None, any(resolution.plan.recomputed_layers)
            )
            problems = limits.problems(host_config, self._name, splits=splits, recomputes=recomputes)
            if splits:
                problems += limits.layers_that_cannot_split(undeferrable_layers(model), self._name)
                make_deferrable(model)
            if problems:
                raise ConfigError(*problems)
            if dist.get_rank() == 0 and not self._resolutions:
                print(resolve.summary(resolution), file=sys.stderr, flush=True)  # noqa: T201 - the promised line
            self._resolutions[num_microbatches] = resolution
        if self._links is None:
            self._links = _open_links(model, groups, dynamic=host_config.variable_seq_lengths)

    def _forward_plan(self, num_microbatches: int) -> Any:
        assert self._layers_per_stage is not None
        return resolve.forward_plan(self._layers_per_stage, num_microbatches)

    def _run(self, step: Step) -> None:
        """Run it; where it fails, leave nothing behind and fail on all ranks alike."""
        step.links.reset_shapes()
        if not step.call.forward_only:
            step.grad_sync.hold()
        if self._guard is not None:
            self._guard.start_step()
        try:
            step.run()
        except Exception as error:
            self._abandon(step)
            if isinstance(error, StopIteration):
                error = DataError(
                    f"a step needs {step.call.num_microbatches} micro-batches, the data iterator gave "
                    f"{step.num_forwards}. Give it more data, or lower --global-batch-size or --eval-iters."
                )
            if self._guard is None:
                raise error
            self._guard.agree(error)
        else:
            if self._guard is not None:
                self._guard.agree(None)

    def _abandon(self, step: Step) -> None:
        step.weight_grads.clear()
        step.grad_sync.let_go()
        if self._links is not None:
            self._links.close()
            self._links = None


def _only(value: Any, what: str) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ConfigError(
            f"{what}: {len(value)} model chunks per rank given; this package's schedules hold one. Remove "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank."
        )
    return value[0]


def _groups() -> Any:
    """The process groups of ``parallel_state`` that gradients are finalized over."""
    groups: Any = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def _count_layers(model: nn.Module, host_config: Any, groups: Any) -> list[int]:
    """Transformer layers of every stage, as they were built.

    Raises:
        ConfigError: they are not as many as the host's config names.
    """
    counts: list[int] = [0] * groups.pp.size()
    dist.all_gather_object(counts, len(transformer_layers(model)), group=groups.pp)
    if sum(counts) != host_config.num_layers:
        raise ConfigError(
            f"--num-layers: {host_config.num_layers} layers asked, {counts} were built on {len(counts)} stages, "
            f"{sum(counts)} in all. Give the stages their layers by --pipeline-model-parallel-layout or "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers."
        )
    return counts


def _open_links(model: nn.Module, groups: Any, *, dynamic: bool) -> Links:
    ranks = dist.get_process_group_ranks(groups.pp)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    neighbours = zip(range(len(ranks)), range(1, len(ranks)), strict=False)
    return Links(ranks, ranks.index(dist.get_rank()), neighbours, device, dynamic=dynamic)
