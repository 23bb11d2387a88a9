"""What travels between neighbouring pipeline ranks: tensors, and a header that tells their shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ext.core.errors import DataError

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
HEADER_LENGTH = 256
"""Numbers in a header."""


class TensorSpec(NamedTuple):
    """Shape and type of one tensor of a message, and whether a gradient travels back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor that such a one can be received into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Specs = tuple[TensorSpec, ...]
Message = Tensor | tuple[Tensor, ...]


class MessageSpec(NamedTuple):
    """What the first message of a step tells about all of them."""

    tensors: Specs
    is_tuple: bool

    @classmethod
    def of(cls, message: Message) -> MessageSpec:
        return cls(tuple(TensorSpec.of(tensor) for tensor in as_tuple(message)), isinstance(message, tuple))

    def is_like(self, other: MessageSpec) -> bool:
        """Whether what one is received into can receive the other."""
        return [(t.shape, t.dtype) for t in self.tensors] == [(t.shape, t.dtype) for t in other.tensors]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors))


def as_tuple(message: Message) -> tuple[Tensor, ...]:
    """The tensors of a message."""
    return message if isinstance(message, tuple) else (message,)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements: backends differ in the types they can send, all of them send bytes."""
    return tensor.view(-1).view(torch.uint8)


def encode(spec: MessageSpec, device: torch.device, name: str) -> Tensor:
    """The header of a message, int64 of ``(HEADER_LENGTH,)``.

    Raises:
        DataError: it has too many tensors.
    """
    numbers = [len(spec.tensors), int(spec.is_tuple)]
    for tensor in spec.tensors:
        numbers += [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), len(tensor.shape), *tensor.shape]
    if len(numbers) > HEADER_LENGTH:
        raise DataError(f"{name}: a message of {len(spec.tensors)} tensors is too long; pass fewer tensors.")
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), dtype=torch.int64, device=device)


def decode(header: Tensor) -> MessageSpec:
    """What a header tells."""
    numbers = iter(header.tolist())
    num_tensors, is_tuple = next(numbers), bool(next(numbers))
    specs = []
    for _ in range(num_tensors):
        dtype, requires_grad, num_dims = (next(numbers) for _ in range(3))
        specs.append(TensorSpec(tuple(next(numbers) for _ in range(num_dims)), _DTYPES[dtype], bool(requires_grad)))
    return MessageSpec(tuple(specs), is_tuple)
