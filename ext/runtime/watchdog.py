"""Ends a run that has stopped making progress, with a report from every rank."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

EXIT_STUCK = 70
_UNWATCHED = nullcontext()
_GRACE_S = 5.0
_KEY = "ext/watchdog/stuck"


class Watchdog:
    """Watches the progress of one rank inside `step` from a thread of its own.

    A rank that has not begun or ended anything for ``seconds`` reports what it does or waits for and what it
    finished last. The others see that through the store of the process group and report too, wherever they are;
    then all of them exit. A rank whose peer is stuck, rather than itself, so names the peer it waits for.

    Args:
        seconds: without progress until a rank counts as stuck; None watches nothing and costs nothing.
        end: called with the exit code after the report, for tests.
    """

    def __init__(self, seconds: float | None, end: Callable[[int], None] = os._exit) -> None:
        self.seconds = seconds
        self._end = end
        self._inside = False
        self._doing = "nothing yet"
        self._finished = "nothing yet"
        self._since = time.monotonic()
        if seconds is not None:
            self._store = dist.distributed_c10d._get_default_store()
            threading.Thread(target=self._watch, name="ext-watchdog", daemon=True).start()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around a whole training or evaluation step; outside of it a rank may take any time."""
        if self.seconds is None:
            yield
            return
        self._begin(f"start of {name}")
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def action(self, name: object) -> AbstractContextManager[None]:
        """Around an action."""
        return _UNWATCHED if self.seconds is None else self._watched_action(str(name))

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait inside an action; ``what`` names the peer."""
        return _UNWATCHED if self.seconds is None else self._watched_wait(what)

    @contextmanager
    def _watched_action(self, name: str) -> Iterator[None]:
        self._begin(name)
        yield
        self._finished = name
        self._begin(f"what follows {name}")

    @contextmanager
    def _watched_wait(self, what: str) -> Iterator[None]:
        action = self._doing
        self._begin(f"{action}, waiting for {what}")
        yield
        self._begin(action)

    def _begin(self, doing: str) -> None:
        self._doing = doing
        self._since = time.monotonic()

    def _watch(self) -> None:
        assert self.seconds is not None
        pause = min(1.0, self.seconds / 4)
        while True:
            time.sleep(pause)
            quiet = time.monotonic() - self._since
            if not self._inside or quiet < min(pause, self.seconds / 2):
                continue
            if quiet > self.seconds:
                with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
                    self._store.set(_KEY, str(dist.get_rank()))
                self._report(quiet, "")
                return
            if self._another_is_stuck():
                self._report(quiet, "; another rank was stuck first")
                return

    def _another_is_stuck(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return self._store.check([_KEY])
        return False

    def _report(self, quiet: float, note: str) -> None:
        text = (
            f"watchdog: rank {dist.get_rank()} has made no progress for {quiet:.1f} s{note}.\n"
            f"  doing: {self._doing}\n"
            f"  last finished: {self._finished}\n"
        )
        sys.stderr.write(text)
        sys.stderr.flush()
        with contextlib.suppress(OSError, ValueError):  # stderr may be no file
            faulthandler.dump_traceback(all_threads=True)
        time.sleep(_GRACE_S)  # the first exit makes the launcher end the others
        self._end(EXIT_STUCK)
