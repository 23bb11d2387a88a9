"""Times of pieces of work, on the CPU at once and on a device when it gets there."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts to time; the result stops and gives a function for the seconds, which on a device are known later."""
    if device.type == "cpu":
        start = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return stop
    module = torch.get_device_module(device)
    begin = module.Event(enable_timing=True)
    begin.record()

    def stop_on_device() -> Callable[[], float]:
        end = module.Event(enable_timing=True)
        end.record()

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3

        return seconds

    return stop_on_device
