"""What surrounds a forward and must surround its recompute: random numbers, autocast, the default device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


class RngTracker(Protocol):
    """Named RNG streams beside torch's default ones, as tensor-parallel hosts keep them."""

    def capture(self) -> Any:
        """The state of every stream."""

    def restore(self, state: Any) -> None:
        """Set every stream to a captured state."""


@dataclass(frozen=True)
class RngState:
    """The default generators of the CPU and of one device, and every stream of the named trackers."""

    cpu: torch.Tensor
    device: torch.device
    on_device: torch.Tensor | None
    trackers: Sequence[RngTracker]
    named: tuple[Any, ...]

    @classmethod
    def capture(cls, device: torch.device, trackers: Sequence[RngTracker]) -> RngState:
        """The streams as they are now."""
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), device, on_device, trackers, tuple(t.capture() for t in trackers))

    def restore(self) -> None:
        """Sets every stream back to where it was captured."""
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
        for tracker, state in zip(self.trackers, self.named, strict=True):
            tracker.restore(state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs the block with these streams and leaves the current ones as they were."""
        current = RngState.capture(self.device, self.trackers)
        self.restore()
        try:
            yield
        finally:
            current.restore()


@dataclass(frozen=True)
class AutocastState:
    """Autocast of the CPU and of one device type."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @classmethod
    def capture(cls, device: torch.device) -> AutocastState:
        """Autocast as it is now."""
        types = dict.fromkeys(("cpu", device.type))
        return cls(
            tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs the block under the same autocast."""
        with ExitStack() as stack:
            for device_type, enabled, dtype in self.settings:
                if enabled or torch.is_autocast_enabled(device_type):
                    autocast = torch.autocast(device_type, dtype, enabled, self.cache_enabled)
                    stack.enter_context(autocast)
            yield


def default_device() -> AbstractContextManager[Any]:
    """What makes the default device the one of now; it may be entered again and again."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, DeviceContext)), nullcontext())
