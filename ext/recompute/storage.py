"""Tensors as views of storages: whose bytes they are and how they are cut out of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def storage_key(tensor: Tensor) -> int | None:
    """Which storage it is, as long as that lives; None for tensors without one."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None  # a tensor subclass that wraps others


def storage_keys(values: Iterable[Any]) -> set[int]:
    return {key for value in values if isinstance(value, Tensor) and (key := storage_key(value)) is not None}


def storage_bytes(tensor: Tensor) -> int:
    return (
        tensor.untyped_storage().nbytes() if storage_key(tensor) is not None else tensor.numel() * tensor.element_size()
    )
