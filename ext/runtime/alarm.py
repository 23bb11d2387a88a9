"""Tells every rank of an error that only some of them can see, and ends those whom it leaves waiting.

Ranks that share experts or tensor-parallel layers see an error together and stop; others wait for them inside a
collective, where no exception reaches them. The store of the process group does. Whoever reaches the end of its step in
time stops there, by agreement; nothing is raised in between, where a rank would leave those waiting that it works with.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ext.core.errors import RoutingError

EXIT_ALARM = 71
PAUSE_S = 0.5
ASKED_PER_S = 1000
"""How often all ranks together ask the store; the more they are, the longer each of them pauses."""
TELL_S = 1.5
"""A rank that has not stopped by itself for so long after it heard the alarm says why."""
GRACE_S = 5.0
"""And so long after it heard, it ends."""
_KEY = "ext/alarm"


class Alarm:
    """One for a rank; every rank of the world makes one where an error may reach some ranks only.

    Args:
        end: called with the exit code, for tests.
    """

    def __init__(self, end: Callable[[int], None] = os._exit) -> None:
        self._end = end
        self._numbers = itertools.count()  # tells one alarm from the next
        self._pause = max(PAUSE_S, dist.get_world_size() / ASKED_PER_S)
        store: Any = dist.distributed_c10d._get_default_store()
        # A connection of its own, where torch gives one: on a shared one it waits behind collectives that start.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ext-alarm", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    @classmethod
    def shared(cls) -> Alarm:
        """The one of this process and its running world; all engines have it in common."""
        world = dist.group.WORLD
        if _shared.alarm is None or _shared.world is not world:
            _shared.alarm, _shared.world = cls(), world
        return _shared.alarm

    def ring(self, error: BaseException) -> None:
        """Tell all ranks of an error that ends this rank's step. It stands until `settle`."""
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
            self._store.set(_KEY, f"{type(error).__name__}:{dist.get_rank()}:{next(self._numbers)}:{error}")

    def hold_back(self) -> None:
        """Before a rank that rang ends: its launcher ends the others at once, who have to say why first."""
        time.sleep(TELL_S + 4 * self._pause)

    def settle(self) -> None:
        """All ranks have come together over the error."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_KEY, "")  # who reads a key while another deletes it waits for the next alarm

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the rank that holds the store is gone: the run is over
            while not self._is_over.wait(self._pause):
                heard = self._read()
                if heard and self._stands(heard, TELL_S):
                    self._tell(heard)
                    if self._stands(heard, GRACE_S - TELL_S):
                        self._end(EXIT_ALARM)
                        return

    def _read(self) -> str:
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""

    def _stands(self, heard: str, seconds: float) -> bool:
        """Whether nobody settled this alarm for so long; a store that is gone tells nothing, so it stands."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_over.wait(self._pause):
                return False
            with contextlib.suppress(RuntimeError):
                if self._read() != heard:
                    return False
        return True

    def _finish(self) -> None:
        """Before the interpreter ends: a thread that it ends inside the store would abort the process."""
        self._is_over.set()
        self._thread.join(timeout=2 * self._pause)

    def _tell(self, heard: str) -> None:
        kind, rank, _, text = heard.split(":", 3)
        sys.stderr.write(f"rank {dist.get_rank()} stops, as rank {rank} failed: {kind}: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def routing_errors_told(alarm: Alarm | None, agrees_after: bool) -> Iterator[None]:
    """An error of one expert-parallel group inside is heard by the ranks of the others, too.

    Args:
        alarm: where such an error would not reach all ranks.
        agrees_after: whether what runs the step brings all ranks together over an error.
    """
    try:
        yield
    except RoutingError as error:
        if alarm is not None:
            alarm.ring(error)
            if not agrees_after:
                alarm.hold_back()
        raise


class _Shared:
    """The alarm of the running world."""

    alarm: Alarm | None = None
    world: dist.ProcessGroup | None = None


_shared = _Shared()
