"""One dispatcher for calls with a capacity, another for calls without."""

from __future__ import annotations

from torch import Tensor

from ext.comm.topology import RankGroup
from ext.moe.dispatchers.base import Dispatcher, Routes
from ext.moe.dispatchers.choosing import ChoosingDispatcher


class ByMode(ChoosingDispatcher):
    """``with_capacity`` for calls with a capacity, ``dropless`` for calls without."""

    def __init__(self, group: RankGroup, num_experts: int, with_capacity: Dispatcher, dropless: Dispatcher) -> None:
        super().__init__(group, num_experts)
        self.with_capacity = with_capacity
        self.dropless = dropless

    def describe(self) -> str:
        return self.dropless.describe()

    def _choose(self, x: Tensor, routes: Routes) -> Dispatcher:
        return self.dropless if routes.capacity is None else self.with_capacity
