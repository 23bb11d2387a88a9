"""A forward-backward function for megatron-core that runs plans; called like the host's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import nn

from ext.adapters.megatron import arguments, check
from ext.adapters.megatron.grad_sync import GradSync
from ext.adapters.megatron.layers import transformer_layers
from ext.adapters.megatron.planning import Plans
from ext.adapters.megatron.states import ADAM_MOMENTS
from ext.adapters.megatron.step import Call, Step
from ext.adapters.megatron.support import unsupported
from ext.adapters.megatron.watches import Watches
from ext.config import ExtConfig
from ext.core.errors import ConfigError, DataError
from ext.pipeline import placement
from ext.pipeline.build import forward_plan
from ext.pipeline.memory_table import StageMemory
from ext.pipeline.plan import Plan
from ext.recompute.pipeline_tables import PipelineTables
from ext.recompute.report import RecomputeReport
from ext.runtime.channels import Links
from ext.runtime.guard import FailureGuard


class PlanForwardBackward:
    """Runs the plan that ``config`` asks for; see ``megatron.core``'s ``get_forward_backward_func``.

    Collective over the pipeline's ranks, and in its first call over the world. One object serves one model: training
    and evaluation, with any number of micro-batches.

    Args:
        config: pipeline and recompute settings.
        name: how a dotted key is called in errors, for settings that came from flags.
        moments: numbers that the optimizer keeps per parameter, for memory budgets.
        iteration: the number of the training step that comes, from 0; absent: calls are counted.
    """

    def __init__(
        self,
        config: ExtConfig,
        name: Callable[[str], str] = "ext.{}".format,
        moments: int = ADAM_MOMENTS,
        iteration: Callable[[], int] | None = None,
    ) -> None:
        check.raise_if_any(unsupported(config, tuple(flag.path for flag in arguments.flags()), name))
        self.config = config
        self.recomputes: dict[int, int] = {}
        self.recompute_report: RecomputeReport | None = None
        self._name = name
        self._moments = moments
        self._plans: Plans | None = None
        self._links: Links | None = None
        self._watches: Watches | None = None
        self._num_trained = 0
        self._iteration = iteration or (lambda: self._num_trained)

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
        call = Call(
            forward_step_func, data_iterator, chunk, host_config, num_microbatches, groups.cp.size(), forward_only,
            collect_non_loss_data, first_val_step,
        )  # fmt: skip
        call = replace(call, data_iterator=self._prepare(call, groups))
        rank = dist.get_group_rank(groups.pp, dist.get_rank())
        plan = self._plan(call)
        sync = GradSync(host_config, chunk, rank, may_start_early=not plan.split_backwards)
        assert self._links is not None
        assert self._plans is not None
        assert self._watches is not None
        units = None if forward_only else self._plans.units_of(num_microbatches, rank)
        step = Step(call, plan, rank, self._links, transformer_layers(chunk), sync, self._watches, units)
        self.recompute_report = None if units is None else units.report
        if forward_only:
            self._run_call(step, groups, force_all_reduce)
            return step.store
        with self._watches.traced(self._iteration(), plan, groups.pp):
            self._run_call(step, groups, force_all_reduce)
        self._num_trained += 1
        return step.store

    def _run_call(self, step: Step, groups: Any, force_all_reduce: bool) -> None:
        """The step, and what Megatron's own function does around it."""
        host_config, plan, sync = step.call.config, step.plan, step.grad_sync
        if host_config.timers is not None:
            host_config.timers("forward-backward", log_level=1).start(barrier=host_config.barrier_with_L1_time)
        self._run(step)
        if not step.call.forward_only:
            sync.finish()
            self.recomputes = dict.fromkeys(plan.stages_of(step.rank), step.num_reruns)
            step.watches.memory.count_states()
            if host_config.finalize_model_grads_func is not None:
                num_tokens = step.num_tokens if host_config.calculate_per_token_loss else None
                host_config.finalize_model_grads_func(
                    [step.call.model], num_tokens, pg_collection=groups, force_all_reduce=force_all_reduce
                )
        if host_config.timers is not None:
            host_config.timers("forward-backward").stop()

    @property
    def plan(self) -> Plan | None:
        """The newest plan of a training step; None before the first one."""
        decision = None if self._plans is None else self._plans.newest
        return None if decision is None else decision.plan

    @property
    def tables(self) -> PipelineTables | None:
        """What a unit policy decided for the newest plan; None where none did."""
        decision = None if self._plans is None else self._plans.newest
        return None if decision is None else decision.tables

    @property
    def memory(self) -> list[StageMemory]:
        """Memory of every stage, as `ext.memory_report` tells it; empty where nobody asked.

        Measured values are there once another call has followed the first training step.
        """
        return [] if self._plans is None else list(self._plans.rows)

    def describe(self) -> dict[str, Any]:
        """What is active, as `ext.describe` tells it of a DeepSpeed engine; empty values before the first step."""
        decision = None if self._plans is None else self._plans.newest
        plan = None if decision is None else decision.plan
        return {
            "active": True,
            "schedule": plan and plan.schedule,
            "policy": decision and decision.policy,
            "partition": {"type": "module", "layers_per_stage": self._plans and self._plans.layers_per_stage},
            "dispatcher": None if self.config.moe is None else self.config.moe.dispatcher.type,
            "plan_hash": plan and plan.hash,
            "orders": {} if plan is None else dict(plan.to_json()),
            "recomputes": {str(stage): count for stage, count in self.recomputes.items()},
        }

    def _prepare(self, call: Call, groups: Any) -> Any:
        """Everything that a call needs and an earlier one may have made.

        Returns:
            What the step takes its micro-batches from.
        """
        host_config = call.config
        if self._plans is None:
            self._plans = Plans(self.config, self._name, call.model, host_config, groups, self._moments)
            self._watches = Watches.of(self.config, self._plans, call.model, host_config, groups)
        if self._links is None:
            self._links = _open_links(call.model, groups, dynamic=host_config.variable_seq_lengths)
        assert self._watches is not None
        self._watches.memory.after_first_step()
        data = call.data_iterator
        if not call.forward_only:
            if self._plans.needs_profile:
                with self._failing_together(call, lambda: 0):
                    measured = self._plans.measure(call, self._links)
                self._plans.take(measured)
                data = measured.data
            self._plans.of(call.num_microbatches)
        return data

    def _plan(self, call: Call) -> Plan:
        assert self._plans is not None
        if not call.forward_only:
            return self._plans.of(call.num_microbatches).plan
        layers = self._plans.layers_per_stage
        return forward_plan(placement.linear(len(layers)), layers, call.num_microbatches)

    def _run(self, step: Step) -> None:
        """Run it; where it fails, leave nothing behind."""
        step.links.reset_shapes()
        if not step.call.forward_only:
            step.grad_sync.hold()
        name = "evaluation" if step.call.forward_only else "a training step"
        with self._failing_together(step.call, lambda: step.num_forwards), step.watches.watchdog.step(name):
            try:
                step.run()
            except Exception:
                step.weight_grads.clear()
                step.grad_sync.let_go()
                raise

    @contextmanager
    def _failing_together(self, call: Call, num_taken: Callable[[], int]) -> Iterator[None]:
        """What fails inside leaves no channel behind, and fails on all ranks alike.

        Args:
            call: for which it runs.
            num_taken: micro-batches that were taken before.
        """
        assert self._plans is not None
        guard = self._plans.guard
        guard.start_step()
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, on every rank
            self._close_links()
            if isinstance(error, StopIteration):
                error = DataError(
                    f"a step needs {call.num_microbatches} micro-batches, the data iterator gave {num_taken()}. Give "
                    "it more data, or lower --global-batch-size or --eval-iters."
                )
            assert self._watches is not None
            guard.agree(self._watches.memory.explained(error))
        else:
            self._agree_on_success(guard)

    def _agree_on_success(self, guard: FailureGuard) -> None:
        try:
            guard.agree(None)
        except Exception:
            self._close_links()  # as the rank that failed did, so that the next call opens them on all ranks
            raise

    def _close_links(self) -> None:
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


def _open_links(model: nn.Module, groups: Any, *, dynamic: bool) -> Links:
    ranks = dist.get_process_group_ranks(groups.pp)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    neighbours = zip(range(len(ranks)), range(1, len(ranks)), strict=False)
    return Links(ranks, ranks.index(dist.get_rank()), neighbours, device, dynamic=dynamic)
