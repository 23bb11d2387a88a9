"""The memory of a Megatron pipeline: counted in the first step, shown beside the prediction, explained where too much.

All of it happens where a profile was made: for a policy or a budget that needs one, or with EXT_MEMORY_REPORT=1. Later
steps run without any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ext.adapters.megatron.planning import Plans
from ext.config import budget
from ext.core.errors import OutOfMemoryError
from ext.pipeline.memory_table import StageMemory
from ext.runtime.live_bytes import CountsOneStep, LiveBytes, storage_bytes, storage_key
from ext.runtime.memory_story import is_out_of_memory, most_seen, story
from ext.runtime.reachable import tensors_in

_PACKAGES = ("megatron.core.optimizer.", "megatron.core.distributed.")
_OF_PARAMETER = ("main_grad", "main_param")


class MemoryWatch(CountsOneStep):
    """What the stages of a pipeline hold. Its methods are collective over the pipeline where they say so.

    Args:
        plans: of this rank.
        model: chunk of this rank.
        host_config: its ``TransformerConfig``; through its ``grad_scale_func`` Megatron's training code shows the
            optimizer.
        group: the pipeline's ranks.
    """

    def __init__(self, plans: Plans, model: nn.Module, host_config: Any, group: Any) -> None:
        self._plans = plans
        plans.note = self.note
        self._model = model
        self._host_config = host_config
        self._group = group
        self._stage = dist.get_group_rank(group, dist.get_rank())
        self._live: int | None = None
        self._was_counted = False

    # -- in the first step ---------------------------------------------------------------------------------

    @contextmanager
    def counting(self, held: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Around the actions of a training step, of which the first is counted.

        Args:
            held: tensors that the step holds beside autograd; asked for whenever something is noted.
        """
        if self._was_counted or not self._plans.rows:
            yield
            return
        self._was_counted = True
        self._counter = LiveBytes([*self._model.parameters(), *nn.Module.buffers(self._model)], held)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def count_states(self) -> None:
        """Once the last backward is done, before the optimizer's step."""
        if self._counter is not None:
            self._live = self._counter.peak + storage_bytes(self._states()) - storage_bytes(self._moments())
            self._counter = None

    def _pack(self, tensor: Tensor) -> Tensor:
        assert self._counter is not None
        self._counter.note(tensor)
        # Megatron's layers look for attributes of their weights in the backward: what saves nothing stays itself.
        return tensor if tensor.is_leaf else tensor.detach()

    # -- after the first step ------------------------------------------------------------------------------

    def after_first_step(self) -> None:
        """At the next call, when the optimizer has made its states: predicted and measured side by side. Collective.

        Raises:
            OutOfMemoryError: on every rank: a stage held more than its budget.
        """
        if self._live is None:
            return
        plans, live, self._live = self._plans, self._live, None
        moments = storage_bytes(self._moments())
        if not moments:  # an optimizer that is out of sight
            moments = plans.rows[self._stage].states.optimizer - storage_bytes(self._main_weights())
        allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        pipeline: list[Any] = [None] * len(plans.rows)
        dist.all_gather_object(pipeline, (live + moments, allocated), group=self._group)
        plans.rows = [
            replace(row, measured=measured, allocated=allocated)
            for row, (measured, allocated) in zip(plans.rows, pipeline, strict=True)
        ]
        plans.show_rows("measured")
        over = [row for row in plans.rows if budget.is_given(plans.config) and most_seen(row) > (row.budget or 0)]
        plans.guard.start_step()
        plans.guard.agree(OutOfMemoryError(self._story(over[0], "held more than its budget")) if over else None)

    def explained(self, error: Exception) -> Exception:
        """The error, or, where a device or host ran out of memory, one that says where and what would fit."""
        counter, self._counter = self._counter, None
        if not is_out_of_memory(error):
            return error
        if not self._plans.rows:
            return OutOfMemoryError(
                f"stage {self._stage} ran out of memory: {error}\nThere is no prediction; set {budget.REPORT_SWITCH}=1 "
                "to get one per stage, or let the recompute policy 'stage_aware' choose what fits."
            )
        row = self._plans.rows[self._stage]
        if counter is not None:
            row = replace(row, measured=max(counter.peak, counter.now) + storage_bytes(self._states()))
        if torch.cuda.is_available():
            row = replace(row, allocated=torch.cuda.max_memory_allocated())
        return OutOfMemoryError(f"{self._story(row, 'ran out of memory')}\n{error}")

    def _story(self, row: StageMemory, what: str) -> str:
        return story(row, what, self._plans.nearest_change(max(0, most_seen(row) - row.total)))

    # -- what is there -------------------------------------------------------------------------------------

    def _states(self) -> Iterator[Tensor]:
        """Parameters, buffers, gradients, and what the optimizer and its wrapper hold."""
        return tensors_in([self._model, self._optimizer()], _PACKAGES, _OF_PARAMETER)

    def _moments(self) -> Iterator[Tensor]:
        """What the optimizer makes in its first step."""
        optimizer = self._optimizer()
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        states = [getattr(getattr(part, "optimizer", None), "state", {}) for part in parts]
        return tensors_in([list(state.values()) for state in states], ())

    def _main_weights(self) -> Iterator[Tensor]:
        """32-bit weights beside those of the model."""
        own = {storage_key(parameter) for parameter in self._model.parameters()}
        beside = (getattr(parameter, "main_param", None) for parameter in self._model.parameters())
        return (tensor for tensor in beside if tensor is not None and storage_key(tensor) not in own)

    def _optimizer(self) -> Any:
        return getattr(self._host_config.grad_scale_func, "__self__", None)
