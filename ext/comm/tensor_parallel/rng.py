"""Random numbers of ranks that share layers: what is whole on every rank draws alike, what is split draws apart.

The default generator is the stream for whole tensors: seed it alike on all ranks of a group. Split tensors draw inside
`RngStream.fork`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RngStream:
    """A random number stream beside the default one of its device; give each rank of a group another seed.

    Args:
        seed: of this rank.
        device: whose generator it stands in for.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        before = self._current()
        torch.manual_seed(seed) if self._device.type == "cpu" else self._module.manual_seed(seed)
        self._state = self._current()
        self._set(before)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is drawn inside comes from this stream."""
        before = self._current()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._current()
            self._set(before)

    def capture(self) -> Any:
        """Where the stream is."""
        return self._state

    def restore(self, state: Any) -> None:
        """Set it to where it was captured."""
        self._state = state

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._device)

    def _current(self) -> torch.Tensor:
        return torch.get_rng_state() if self._device.type == "cpu" else self._module.get_rng_state(self._device)

    def _set(self, state: torch.Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            self._module.set_rng_state(state, self._device)
