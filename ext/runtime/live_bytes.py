"""A counter of the bytes that autograd and the engine hold at once, each storage counted once.

Counting costs a Python call per saved tensor, so it runs when somebody asks: in a profile or in one step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Counts storages from the moment they are noted until they are freed.

    Args:
        ignored: tensors that do not count: parameters and buffers.
        held: further tensors that are held at the moment; asked for whenever something is noted.

    Attributes:
        now: bytes of all noted storages that are alive.
        peak: the most that these and the held ones came to.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), held: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self.now = 0
        self.peak = 0
        self._ignored = {storage_key(tensor) for tensor in ignored}
        self._held = held
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of every noted storage that is alive, by its `storage_key`."""
        return {key: size for key, (_, size) in self._alive.items()}

    def note(self, tensor: Tensor) -> Tensor:
        """Count the tensor's storage until it is freed; returns the tensor."""
        key = storage_key(tensor)
        if key not in self._ignored and key not in self._alive:
            storage = tensor.untyped_storage()
            size = storage.nbytes()

            def freed(_: Any) -> None:
                del self._alive[key]
                self.now -= size

            self._alive[key] = weakref.ref(storage, freed), size
            self.now += size
        self.sample()
        return tensor

    def sample(self) -> None:
        """Bring the peak up to date with the tensors that are held."""
        self.peak = max(self.peak, self.total)

    @property
    def total(self) -> int:
        """Bytes of all noted storages that are alive, and of the held ones."""
        held = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in self._held()}
        beside = sum(size for key, size in held.items() if key not in self._alive and key not in self._ignored)
        return self.now + beside

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Note what autograd saves while this lasts. What a checkpoint drops is not saved."""
        with saved_tensors_hooks(lambda tensor: self.note(tensor).detach(), lambda tensor: tensor):
            yield

    @contextmanager
    def reruns(self) -> Iterator[None]:
        """Inside the re-run of a checkpoint: note what it brings back."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
        if hooks is None:
            yield
            return
        pack, unpack = hooks
        with saved_tensors_hooks(lambda tensor: pack(self.note(tensor)), unpack):
            yield

    @contextmanager
    def created(self) -> Iterator[None]:
        """Note every tensor that an operation gives while this lasts, backward included."""
        with _Created(self):
            yield


class CountsOneStep:
    """For those who count in one step and let all others pass: there is no counter outside of it."""

    _counter: LiveBytes | None = None

    def reruns(self) -> AbstractContextManager[None]:
        """Around every re-run of dropped layers."""
        return nullcontext() if self._counter is None else self._counter.reruns()

    def note(self, tensor: Tensor) -> None:
        """A tensor is kept or brought back by other means than autograd's own."""
        if self._counter is not None:
            self._counter.note(tensor)

    def sample(self) -> None:
        """After a forward, whose outputs autograd itself may not hold."""
        if self._counter is not None:
            self._counter.sample()


class _Created(TorchDispatchMode):
    def __init__(self, counter: LiveBytes) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._counter.note(tensor)
        return outputs


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind these tensors, each counted once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def storage_key(tensor: Tensor) -> int:
    """Which storage it is, as long as that lives."""
    return tensor.untyped_storage()._cdata
