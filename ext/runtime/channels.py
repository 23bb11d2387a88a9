"""Point-to-point channels between neighbouring pipeline ranks.

Activations and gradients travel in opposite directions, and NCCL runs the operations of one communicator in
order, so each direction between two ranks has a process group of its own. Sends and receives are asynchronous:
a sent tensor is kept, untouched, until it has left; a receive is posted early and waited for by the action that
needs it. Messages of one channel arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ext.core.errors import CommunicationError, DataError
from ext.pipeline.passes import MAX_UNFINISHED_SENDS

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
_HEADER_LENGTH = 256
_OPEN_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class TensorSpec:
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


@dataclass(frozen=True)
class MessageSpec:
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


class Channel:
    """One direction between this rank and one peer.

    Args:
        peer: the other end's rank in ``group``.
        group: communicator of the two, used by this direction only.
        device: where received tensors are allocated.
        name: what errors call the channel.
    """

    def __init__(self, peer: int, group: Any, device: torch.device, name: str) -> None:
        self._peer = peer
        self.name = name
        self._group = group
        self._device = device

    def _isend(self, tensor: Tensor) -> tuple[Any, Tensor] | None:
        wire = _bytes_of(tensor.detach().contiguous())
        with self._naming_lost_peer():
            return (self._group.send([wire], self._peer, 0), wire) if wire.numel() else None

    def _irecv(self, tensor: Tensor) -> Any | None:
        wire = _bytes_of(tensor)
        with self._naming_lost_peer():
            return self._group.recv([wire], self._peer, 0) if wire.numel() else None

    def _wait(self, work: Any) -> None:
        with self._naming_lost_peer():
            work.wait()

    @contextmanager
    def _naming_lost_peer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(f"{self.name}: {error}") from error

    def close(self) -> None:
        """Leave: a peer that waits on this channel gets an error instead of waiting for ever."""
        # Gloo closes its sockets when the object goes, NCCL when it is told to.
        self._group.abort()
        del self._group


class Sender(Channel):
    """The sending end.

    Every message tells its shapes where ``dynamic``; otherwise the first after `reset_shapes` does, for all. The
    receiver then takes this first one for one like the last and posts its receive at once, which saves it a way there
    and back; where it was wrong, a stand-in of the old shapes goes first.
    """

    def __init__(self, peer: int, group: Any, device: torch.device, name: str, dynamic: bool) -> None:
        super().__init__(peer, group, device, name)
        self._dynamic = dynamic
        self._spec: MessageSpec | None = None
        self._expected: MessageSpec | None = None
        self._unfinished: deque[tuple[Any, Tensor]] = deque()

    def send(self, message: Message, microbatch: int) -> None:
        """Start sending; the tensors must not be written to until `drain`.

        Raises:
            DataError: other shapes than in the first message, on a channel that is not dynamic.
        """
        spec = MessageSpec.of(message)
        if self._spec is None or self._dynamic:
            self._start(_encode(spec, self._device, self.name))
            if self._expected is not None and not self._expected.is_like(spec):
                for expected in self._expected.tensors:
                    self._start(expected.empty(self._device))
            self._spec, self._expected = spec, None
        elif spec != self._spec:
            raise DataError(
                f"micro-batch {microbatch}: {self.name} got {spec}, expected {self._spec} as in the first "
                "micro-batch of the step. Pad to one size, or build the PipelineModule with dynamic_shape=True."
            )
        self.send_known(as_tuple(message))

    def send_known(self, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors whose shapes the other end knows."""
        for tensor in tensors:
            self._start(tensor)
        while len(self._unfinished) > MAX_UNFINISHED_SENDS:
            # Safe: plans are proved to end even when every send blocks until its receive is posted.
            self._finish_one()

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        while self._unfinished:
            self._finish_one()

    def reset_shapes(self) -> None:
        """The next message tells its shapes again; the receiving end must do the same."""
        self._expected = None if self._dynamic else self._spec
        self._spec = None

    def close(self) -> None:
        self._unfinished.clear()
        super().close()

    def _start(self, tensor: Tensor) -> None:
        started = self._isend(tensor)
        if started is not None:
            self._unfinished.append(started)

    def _finish_one(self) -> None:
        work, _ = self._unfinished.popleft()
        self._wait(work)


@dataclass
class _Receive:
    """One posted receive: first its header where the size is not known, then its tensors."""

    microbatch: int
    spec: MessageSpec | None
    header: tuple[Any, Tensor] | None = None
    tensors: tuple[Tensor, ...] | None = None
    works: Sequence[Any] = ()


class Receiver(Channel):
    """The receiving end; see `Sender`."""

    def __init__(self, peer: int, group: Any, device: torch.device, name: str, dynamic: bool) -> None:
        super().__init__(peer, group, device, name)
        self._dynamic = dynamic
        self._spec: MessageSpec | None = None
        self._expected: MessageSpec | None = None
        self._posted: deque[_Receive] = deque()

    def post(self, microbatch: int, specs: Specs | None = None) -> None:
        """Post the receive of the next message; ``specs`` where this end knows them, as for gradients.

        A receive whose size is not known yet starts as soon as it is.
        """
        self._posted.append(_Receive(microbatch, None if specs is None else MessageSpec(specs, is_tuple=True)))
        self._start_posted()

    def wait(self, microbatch: int) -> Message:
        """The oldest posted message, which must be that of ``microbatch``.

        Raises:
            CommunicationError: the peer left.
        """
        receive = self._posted[0]
        assert receive.microbatch == microbatch, f"{self.name}: waits for {microbatch}, next is {receive.microbatch}"
        if receive.header is not None:
            work, header = receive.header
            self._wait(work)
            receive.header = None
            receive.spec = self._spec = _decode(header)
            if self._expected is not None and not self._expected.is_like(self._spec):
                self._wait_all(receive)
                receive.tensors = None
            self._expected = None
            self._start_posted()
        assert receive.spec is not None
        assert receive.tensors is not None
        self._wait_all(receive)
        self._posted.popleft()
        for tensor, spec in zip(receive.tensors, receive.spec.tensors, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return receive.tensors if receive.spec.is_tuple else receive.tensors[0]

    def reset_shapes(self) -> None:
        """The next message tells its shapes again; the sending end must do the same."""
        self._expected = None if self._dynamic else self._spec
        self._spec = None

    def close(self) -> None:
        self._posted.clear()
        super().close()

    def _start_posted(self) -> None:
        """Start what can be started: data once its size is known, and nothing before its predecessor."""
        for receive in self._posted:
            if receive.header is not None:
                return
            if receive.tensors is not None:
                continue
            if receive.spec is None and not self._dynamic:
                receive.spec = self._spec
            if receive.spec is None:
                header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
                work = self._irecv(header)
                assert work is not None
                receive.header = (work, header)
                if self._expected is not None:
                    self._start_tensors(receive, self._expected)
                return
            self._start_tensors(receive, receive.spec)

    def _start_tensors(self, receive: _Receive, spec: MessageSpec) -> None:
        receive.tensors = tuple(tensor.empty(self._device) for tensor in spec.tensors)
        receive.works = [work for tensor in receive.tensors if (work := self._irecv(tensor)) is not None]

    def _wait_all(self, receive: _Receive) -> None:
        for work in receive.works:
            self._wait(work)


class Links:
    """All channels of this rank, opened from the pairs of ranks that exchange activations.

    Collective over the ranks of one pipeline, but each group is created by its two members alone: the cost
    for a rank depends on its neighbours, not on the length of the pipeline or the size of the world.

    Args:
        ranks: global rank of each pipeline rank.
        rank: this pipeline rank.
        edges: pairs of pipeline ranks (a, b) where activations go from a to b and gradients from b to a.
        device: where received tensors are allocated.
        dynamic: shapes may differ between the micro-batches of a step.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        edges: Iterable[tuple[int, int]],
        device: torch.device,
        *,
        dynamic: bool,
    ) -> None:
        self._forward: dict[int, Sender] = {}
        self._backward: dict[int, Sender] = {}
        self._inputs: dict[int, Receiver] = {}
        self._output_grads: dict[int, Receiver] = {}
        # One total order on every rank rules out cycles of waiting; pairs with an even first rank, then the
        # others, lets a linear pipeline connect in two rounds whatever its length.
        for a, b in sorted({edge for edge in edges if edge[0] != edge[1]}, key=lambda edge: (min(edge) % 2, edge)):
            if rank not in (a, b):
                continue
            members = (ranks[a], ranks[b])
            forward = _open_pair(members, "activations", device)
            backward = _open_pair(members, "gradients", device)
            if rank == a:
                self._forward[b] = Sender(1, forward, device, f"stage output to rank {b}", dynamic)
                self._output_grads[b] = Receiver(1, backward, device, f"gradient from rank {b}", dynamic)
            else:
                self._inputs[a] = Receiver(0, forward, device, f"stage input from rank {a}", dynamic)
                self._backward[a] = Sender(0, backward, device, f"gradient to rank {a}", dynamic)

    def outputs_to(self, rank: int) -> Sender:
        """The channel of activations to a pipeline rank."""
        return self._forward[rank]

    def inputs_from(self, rank: int) -> Receiver:
        """The channel of activations from a pipeline rank."""
        return self._inputs[rank]

    def input_grads_to(self, rank: int) -> Sender:
        """The channel of gradients to a pipeline rank."""
        return self._backward[rank]

    def output_grads_from(self, rank: int) -> Receiver:
        """The channel of gradients from a pipeline rank."""
        return self._output_grads[rank]

    def reset_shapes(self) -> None:
        """Every channel tells its shapes again; all ranks do this at the start of a step."""
        for channel in (*self._forward.values(), *self._inputs.values()):
            channel.reset_shapes()

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        for sender in (*self._forward.values(), *self._backward.values()):
            sender.drain()

    def close(self) -> None:
        """Leave all groups: neighbours that wait for this rank get an error."""
        for channel in (
            *self._forward.values(),
            *self._backward.values(),
            *self._inputs.values(),
            *self._output_grads.values(),
        ):
            channel.close()


def _open_pair(ranks: tuple[int, int], label: str, device: torch.device) -> Any:
    """A communicator that the two ranks create by themselves.

    ``torch.distributed.new_group`` is collective over the world, or names a group after the number of groups
    the rank already has, which differs between the ranks of a pipeline. Both ends count the pair's
    communicators instead.
    """
    key = (ranks, label)
    _num_opened[key] = count = _num_opened.get(key, 0) + 1
    name = f"ext/{label}/{ranks[0]}-{ranks[1]}/{count}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # pyright: ignore[reportPrivateImportUsage]
    me = ranks.index(dist.get_rank())
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, me, 2, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, me, 2, _gloo_options())


_num_opened: dict[tuple[tuple[int, int], str], int] = {}


def _gloo_options() -> Any:
    """For a group of point-to-point messages. All share one thread, which wakes a hundred times a second."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices, options._threads, options._timeout = _gloo_devices(), 1, _OPEN_TIMEOUT
    return options


@cache
def _gloo_devices() -> Any:
    """What gloo chooses for any group of this process, by GLOO_SOCKET_IFNAME or the host's name."""
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, _OPEN_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
    return alone.options._devices  # pyright: ignore[reportAttributeAccessIssue]


def _bytes_of(tensor: Tensor) -> Tensor:
    """The storage as bytes: backends differ in the types they can send, all of them send bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _encode(spec: MessageSpec, device: torch.device, name: str) -> Tensor:
    numbers = [len(spec.tensors), int(spec.is_tuple)]
    for tensor in spec.tensors:
        numbers += [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), len(tensor.shape), *tensor.shape]
    if len(numbers) > _HEADER_LENGTH:
        raise DataError(f"{name}: a message of {len(spec.tensors)} tensors is too long; pass fewer tensors.")
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)), dtype=torch.int64, device=device)


def _decode(header: Tensor) -> MessageSpec:
    numbers = iter(header.tolist())
    num_tensors, is_tuple = next(numbers), bool(next(numbers))
    specs = []
    for _ in range(num_tensors):
        dtype, requires_grad, num_dims = (next(numbers) for _ in range(3))
        specs.append(TensorSpec(tuple(next(numbers) for _ in range(num_dims)), _DTYPES[dtype], bool(requires_grad)))
    return MessageSpec(tuple(specs), is_tuple)
