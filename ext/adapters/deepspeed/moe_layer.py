"""DeepSpeed's MoE layer with our routing and dispatch; parameters, their names and checkpoints stay DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import FIRST_ALLTOALL_TIMER, MOE_TIMER, SECOND_ALLTOALL_TIMER, MOELayer, TopKGate
from torch import Tensor, nn
from torch.nn import functional

from ext.adapters.deepspeed.moe_gate import GateRouter
from ext.core.errors import ConfigError
from ext.moe.aux_loss import attach
from ext.moe.dispatchers.base import Dispatcher
from ext.moe.router import RouterConfig
from ext.runtime.alarm import Alarm, routing_errors_told


class DispatchMOELayer(MOELayer):
    """Takes the place of a `MOELayer`, over its gate and experts.

    Differs from it where it hangs, pads or drops for want of agreement: ranks may have any number of tokens, even
    none; without dropping only rows that carry tokens travel.
    """

    def __init__(self, host: MOELayer, name: str, config: RouterConfig) -> None:
        super().__init__(host.gate, host.experts, host.ep_group_name, host.ep_size, host.num_local_experts)
        self.train(host.training)
        self.name = name
        assert isinstance(host.gate, TopKGate)
        self.router = GateRouter(host.gate, config, name)
        self.dispatcher: Dispatcher | None = None  # set once the expert-parallel group exists
        self.loss_scale = _unscaled
        self.alarm: Alarm | None = None  # where an error of this layer may reach some ranks only
        self.agrees_after = False  # whether the engine brings all ranks together over an error

    def forward(
        self, *inputs: Tensor | None, top_k: int | None = None, capacity_factor: float | None = None, **_: Any
    ) -> Tensor:
        """(..., hidden) -> (..., hidden). Collective over the expert-parallel group.

        Args:
            inputs: hidden states, then optionally the mask of used tokens, as DeepSpeed passes them.
            top_k: choices per token in this call; absent: the gate's k.
            capacity_factor: in this call; absent: the gate's.
        """
        hidden, used_tokens = inputs[0], inputs[1] if len(inputs) > 1 else None
        assert hidden is not None
        dispatcher = self._connected()
        with self._timed(MOE_TIMER, "time_moe"):
            x = hidden.reshape(-1, hidden.shape[-1])
            with routing_errors_told(self.alarm, self.agrees_after):
                routing = self.router(x, used_tokens, dispatcher.group, top_k, capacity_factor)
            selection = routing.selection
            self.l_aux, self.exp_counts = routing.l_aux, selection.counts
            with self._timed(FIRST_ALLTOALL_TIMER, "time_falltoall"):
                rows, per_expert, state = dispatcher.dispatch(
                    x,
                    selection.kept_ids,
                    routing.probs,
                    capacity=selection.capacity,
                    locations=selection.locations,
                    max_tokens=routing.max_tokens,
                )
            rows = self.experts(rows) if selection.capacity is not None else self._run_experts(rows, per_expert)
            with self._timed(SECOND_ALLTOALL_TIMER, "time_salltoall"):
                output = dispatcher.combine(rows, state)
        weight = self.router.config.aux_loss_weight
        if weight is not None:
            output = attach(output, weight * self.l_aux, self.loss_scale)
            self.l_aux = self.l_aux.detach()
        return output.reshape(hidden.shape)

    def _run_experts(self, rows: Tensor, per_expert: list[int]) -> Tensor:
        """Every expert on its own rows, also on none, so that each has a gradient."""
        outputs = []
        experts = cast(nn.ModuleList, self.experts.deepspeed_experts)
        for expert, part in zip(experts, rows.split(per_expert), strict=True):
            output = expert(part)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return torch.cat(outputs)

    def _connected(self) -> Dispatcher:
        if self.dispatcher is None:
            raise ConfigError(
                f"MoE layer {self.name}: its ranks are not connected yet. Build the engine with ext.initialize "
                "before the first forward."
            )
        return self.dispatcher

    @contextmanager
    def _timed(self, timer: str, attribute: str) -> Iterator[None]:
        """DeepSpeed's timers, where its config asks for them."""
        if not self.wall_clock_breakdown:
            yield
            return
        self.timers(timer).start()
        yield
        self.timers(timer).stop()
        setattr(self, attribute, self.timers(timer).elapsed(reset=False))


class DispatchMoE(MoE):
    """DeepSpeed's `MoE` whose number of choices and capacity factor may change with every call."""

    deepspeed_moe: DispatchMOELayer

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        problem = uneven_problem(num_experts, ep_size)
        if problem:
            raise ConfigError(f"MoE layer of hidden size {hidden_size}: {problem}")
        super().__init__(hidden_size, expert, num_experts, ep_size, *args, **kwargs)

    def forward(
        self,
        hidden_states: Tensor,
        used_token: Tensor | None = None,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, auxiliary loss and tokens per expert, as DeepSpeed's own.

        Args:
            hidden_states: (..., hidden).
            used_token: nonzero for tokens that take part; absent: all.
            top_k: choices per token in this call; the same on every rank.
            capacity_factor: in this call; the same on every rank.
        """
        output = self.deepspeed_moe(hidden_states, used_token, top_k=top_k, capacity_factor=capacity_factor)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = functional.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def uneven_problem(num_experts: int, ep_size: int) -> str:
    """Why ranks cannot share the experts; empty if they can."""
    if ep_size >= 1 and num_experts % ep_size == 0:
        return ""
    even = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
    return (
        f"num_experts = {num_experts} cannot be spread evenly over ep_size = {ep_size} ranks. Use ep_size {even}, or "
        f"make num_experts a multiple of {ep_size}."
    )


def _unscaled() -> float:
    return 1.0
