"""Windows under the all-reduces of tensor-parallel layers: what is recomputed while a collective is on its way.

A layer of units is told of every all-reduce of its own (`ext.comm.tensor_parallel.hooks`). One in a micro-batch's
backward recomputes for the same micro-batch: under that of the MLP half's input gradient the attention half of the
same layer (B1), under that of the attention half's the MLP half of the layer before (B2). One in a forward (F1, F2)
recomputes for the micro-batch whose backward the stage runs next. All of it goes to the stream of the layer, behind
the launch of the collective and the weight gradient and before the wait.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ext.recompute.units import MLP, Unit
from ext.recompute.windows import UNDER_FORWARD


class _Run(Protocol):
    """One layer for one micro-batch, see `ext.recompute.unit_run.LayerRun`."""

    def recompute(self, windows: Sequence[str]) -> None: ...

    def awaits(self, window: str) -> bool: ...


Runs = Sequence["weakref.ref[Any]"]
"""The layers of a stage for one micro-batch, first layer first, as long as their graph lives."""


class ForwardFiller:
    """Spreads what one micro-batch left to F1 and F2 over the all-reduces of another one's forward.

    The layers come last first, in the order in which their backward needs them, each with F1 before F2. Tables may
    give more to some layers than to others: what there is to do is dealt out evenly over the windows that are left.
    """

    def __init__(self, runs: Runs, num_windows: int) -> None:
        """``num_windows`` that the forward will open, at least."""
        alive = [run for reference in reversed(runs) if (run := reference()) is not None]
        self._todo = [(weakref.ref(run), window) for run in alive for window in UNDER_FORWARD if run.awaits(window)]
        self._left = max(1, num_windows)

    def fill(self) -> None:
        """One window: recompute its share."""
        share = math.ceil(len(self._todo) / self._left)
        now, self._todo = self._todo[:share], self._todo[share:]
        self._left = max(1, self._left - 1)
        for reference, window in now:
            run = reference()
            if run is not None:
                run.recompute((window,))


class UnitListener:
    """Is told of the all-reduces of one unit, see `ext.comm.tensor_parallel.hooks.Listener`."""

    def __init__(self, unit: Unit, runs: Runs, number: int, in_forward: Callable[[], None]) -> None:
        """``number`` is the position in ``runs`` of the unit's layer."""
        is_mlp = unit.half == MLP
        self._window = "B1" if is_mlp else "B2"
        target = number if is_mlp else number - 1
        self._target = runs[target] if target >= 0 else None
        self._in_forward = in_forward

    def forward_launched(self, work: Any) -> None:
        self._in_forward()

    def backward_launched(self, work: Any) -> None:
        run = None if self._target is None else self._target()
        if run is not None:
            run.recompute((self._window,))
