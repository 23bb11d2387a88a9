"""When data-parallel gradient reductions may start, as Megatron's own schedules decide it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class GradSync:
    """Holds reductions back until the last backward of the step; see ``no_sync_func`` and ``grad_sync_func``.

    Without ``grad_sync_func`` reductions start from inside the last backward. With it (``--align-grad-reduce``) they
    do so on the first rank only, and all others start theirs in `finish`, so that all begin together.
    A split backward makes parameters ready in I and in W, so there all reductions start in `finish`.

    Args:
        config: Megatron's.
        model: the rank's model chunk.
        rank: in the pipeline.
        may_start_early: whether one last backward makes all gradients ready.
    """

    def __init__(self, config: Any, model: nn.Module, rank: int, *, may_start_early: bool) -> None:
        self._config = config
        self._model = model
        self._starts_early = may_start_early and (config.grad_sync_func is None or rank == 0)
        self._held: AbstractContextManager[Any] | None = None

    def hold(self) -> None:
        """No reduction starts from here on."""
        held = (self._config.no_sync_func or nullcontext)()
        held.__enter__()
        self._held = held

    def before_last_backward(self) -> None:
        """Reductions start from inside the backward that follows, where they may."""
        if self._starts_early:
            self.let_go()

    def finish(self) -> None:
        """Start what has not started; ``finalize_model_grads`` waits for it."""
        if self._held is None:
            return
        self.let_go()
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(self._model.parameters())
        elif getattr(getattr(self._model, "ddp_config", None), "overlap_grad_reduce", False):
            self._model.start_grad_sync()  # type: ignore[operator]

    def let_go(self) -> None:
        """Leave the context of ``no_sync_func``; does nothing outside of it."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)
