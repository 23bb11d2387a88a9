"""Who is told when a collective of a tensor-parallel layer is on its way, so that other work can run under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch.distributed import Work


class Listener(Protocol):
    """Is told between the launch of a collective and the wait for it.

    What it does then must launch no collective of its own: the other ranks would have to do so at the same moment.
    On a device its work goes to the stream of the layer, so that it runs between the two.
    """

    def forward_launched(self, work: Work) -> None:
        """An all-reduce of an output is under way."""

    def backward_launched(self, work: Work) -> None:
        """An all-reduce of an input gradient is under way, and the weight gradient is behind it."""


_listener: ContextVar[Listener | None] = ContextVar("ext_tensor_parallel_listener", default=None)


def current_listener() -> Listener | None:
    """Who listens to the layers that run now; a backward tells who listened to its forward."""
    return _listener.get()


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Layers whose forward runs inside tell ``listener``; None tells nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
