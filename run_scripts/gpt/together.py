"""Things all ranks do together: fail with one text, and stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ext.core.errors import ExtError
from gpt import device

T = TypeVar("T")


def together(action: Callable[[], T]) -> T:
    """Run `action`; if it raises an `ExtError` on any rank, raise that of the first such rank on every rank.

    Collective over all ranks. `action` itself must not be, and must not fail half-way through something that is.
    """
    result, mine = None, None
    try:
        result = action()
    except ExtError as error:
        mine = error
    raise_first(mine)
    return result  # type: ignore[return-value]


def raise_first(error: ExtError | None) -> None:
    """Raise the error of the lowest rank that has one on every rank; nothing if none has. Collective."""
    errors: list[ExtError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for other in errors:
        if other is not None:
            raise other


def from_first(action: Callable[[], T]) -> T:
    """The result of `action` on rank 0, on every rank, or its `ExtError`. Collective."""
    results: list[Any] = [together(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(results, src=0)
    return results[0]


class StopSignal:
    """Turns SIGINT and SIGTERM into a stop of all ranks after the step they are in.

    The launcher passes each signal on, so that a rank may see two for one Ctrl-C; only a second one after
    `PATIENCE_S` seconds ends the process at once. A rank that is still busy `GRACE_S` seconds after the first
    one (it may wait for a rank that is gone) ends as well.
    """

    PATIENCE_S = 3.0
    GRACE_S = 25.0  # the launcher kills after 30

    def __init__(self) -> None:
        self._signum = 0
        self._since = 0.0
        self._finished = threading.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)
        # Handlers wait for the interpreter, this pipe does not: it also works while a rank waits inside gloo.
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._end_if_stuck, args=(read_end,), daemon=True).start()

    def agreed(self) -> int:
        """The signal that any rank has seen, or 0. Collective over all ranks, one number."""
        seen = torch.tensor([self._signum], device=device.current())
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return int(seen.item())

    def finish(self) -> None:
        """Leave the process alone from now on."""
        self._finished.set()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signum and now - self._since > self.PATIENCE_S:
            os._exit(128 + signum)
        self._since = self._since or now
        self._signum = signum

    def _end_if_stuck(self, read_end: int) -> None:
        signum = os.read(read_end, 1)[0]
        if not self._finished.wait(self.GRACE_S):
            os._exit(128 + signum)
