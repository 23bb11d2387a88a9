"""One dispatcher for calls with a capacity, another for calls without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ext.comm.topology import RankGroup
from ext.moe.dispatchers.base import Dispatcher


@dataclass(frozen=True)
class ChosenState:
    """Which dispatcher took the tokens, and what it needs to bring them back."""

    dispatcher: Dispatcher
    inner: Any


class ByMode(Dispatcher):
    """``with_capacity`` for calls with a capacity, ``dropless`` for calls without."""

    def __init__(self, group: RankGroup, num_experts: int, with_capacity: Dispatcher, dropless: Dispatcher) -> None:
        super().__init__(group, num_experts)
        self.with_capacity = with_capacity
        self.dropless = dropless

    def dispatch(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_probs: Tensor,
        *,
        capacity: int | None = None,
        locations: Tensor | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Tensor, list[int], ChosenState]:
        chosen = self.dropless if capacity is None else self.with_capacity
        rows, per_expert, state = chosen.dispatch(
            x, topk_ids, topk_probs, capacity=capacity, locations=locations, max_tokens=max_tokens
        )
        return rows, per_expert, ChosenState(chosen, state)

    def combine(self, expert_output: Tensor, state: ChosenState) -> Tensor:
        return state.dispatcher.combine(expert_output, state.inner)

    def describe(self) -> str:
        return self.dropless.describe()
