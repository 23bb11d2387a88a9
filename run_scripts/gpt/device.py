"""What differs between CPUs and accelerators, through DeepSpeed's own choice of device."""

from __future__ import annotations

import resource
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

_STREAM = "stream of "


def _accelerator() -> Any:
    return get_accelerator()


def is_cpu() -> bool:
    """Whether the run uses no accelerator."""
    return _accelerator().device_name() == "cpu"


def current() -> torch.device:
    """The device of this rank."""
    return torch.device(_accelerator().current_device_name())


def peak_memory_bytes() -> int:
    """The most memory this process has held: allocated on the device, or on a CPU resident."""
    if is_cpu():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return _accelerator().max_memory_allocated()


def random_state() -> dict[str, torch.Tensor]:
    """What dropout draws from: on CPU and device, and the named streams of tensor-parallel layers."""
    state = {"cpu": torch.get_rng_state()}
    if not is_cpu():
        state["device"] = _accelerator().get_rng_state()
    streams = get_cuda_rng_tracker().get_states()
    return state | {_STREAM + name: stream for name, stream in streams.items()}


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if not is_cpu():
        _accelerator().set_rng_state(state["device"])
    streams = {name.removeprefix(_STREAM): stream for name, stream in state.items() if name.startswith(_STREAM)}
    get_cuda_rng_tracker().set_states(streams)
