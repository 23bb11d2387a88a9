"""Dispatchers that hand every call to one of several others."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ext.core.replay import remember
from ext.moe.dispatchers.base import Dispatcher, Routes


@dataclass(frozen=True)
class ChosenState:
    """Which dispatcher took the tokens, and what it needs to bring them back."""

    dispatcher: Dispatcher
    inner: Any


class ChoosingDispatcher(Dispatcher):
    """Chooses a dispatcher in every call, the same on every rank; a re-run for recomputation keeps the choice."""

    @abstractmethod
    def _choose(self, x: Tensor, routes: Routes) -> Dispatcher:
        """The dispatcher that takes (tokens, hidden). May be collective."""

    def _dispatch(self, x: Tensor, routes: Routes) -> tuple[Tensor, list[int], ChosenState]:
        chosen = remember(lambda: self._choose(x, routes))
        rows, per_expert, state = chosen._dispatch(x, routes)
        return rows, per_expert, ChosenState(chosen, state)

    def combine(self, expert_output: Tensor, state: ChosenState) -> Tensor:
        return state.dispatcher.combine(expert_output, state.inner)
