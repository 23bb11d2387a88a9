"""What a layer decided in its first run, for the re-run of the same layer on the same micro-batch.

Recomputation calls a layer a second time. Arithmetic repeats itself and random numbers are restored, but a
decision that depends on other ranks (MoE capacity, routing) must not be taken again. Such a layer wraps it
in `remember`. The recompute engines open the scope; this module knows neither them nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Memory:
    """Decisions of one layer for one micro-batch, in the order in which they were taken."""

    def __init__(self) -> None:
        self._decisions: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The layer's first run: `remember` computes and keeps."""
        self._decisions.clear()
        with _scope(_Scope(self._decisions, replaying=False)):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The layer's re-run: `remember` returns what the first run kept."""
        with _scope(_Scope(self._decisions, replaying=True)):
            yield


def remember(decide: Callable[[], T]) -> T:
    """``decide()`` in a first run or outside of recomputation; in a re-run, what the first run decided.

    A layer must call this the same number of times, in the same order, in both runs. What ``decide`` itself
    remembers is part of its decision and not kept apart.
    """
    scope = _current.get()
    if scope is None:
        return decide()
    if scope.replaying:
        decision = scope.decisions[scope.position]
        scope.position += 1
        return decision
    with _scope(None):
        decision = decide()
    scope.decisions.append(decision)
    return decision


def is_replaying() -> bool:
    """Whether the running layer is a re-run: statistics and collectives must not be repeated."""
    scope = _current.get()
    return scope is not None and scope.replaying


class _Scope:
    def __init__(self, decisions: list[Any], *, replaying: bool) -> None:
        self.decisions = decisions
        self.replaying = replaying
        self.position = 0


_current: ContextVar[_Scope | None] = ContextVar("ext_replay_scope", default=None)


@contextmanager
def _scope(scope: _Scope | None) -> Iterator[None]:
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)
