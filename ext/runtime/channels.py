"""Point-to-point channels between neighbouring pipeline ranks.

Activations and gradients travel in opposite directions, and NCCL runs the operations of one communicator in
order, so each direction between two ranks has a process group of its own. Sends and receives are asynchronous:
a sent tensor is kept, untouched, until it has left; a receive is posted early and waited for by the action that
needs it. Messages of one channel arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ext.core.errors import CommunicationError, DataError
from ext.pipeline.passes import MAX_UNFINISHED_SENDS
from ext.runtime import messages
from ext.runtime.messages import Message, MessageSpec, Specs, as_bytes, as_tuple
from ext.runtime.pairs import open_pair


class Channel:
    """One direction between this rank and one peer.

    Args:
        peer: the other end's rank in ``group``.
        group: communicator of the two, used by this direction only.
        device: where received tensors are allocated.
        name: what errors call the channel.
        dynamic: whether shapes may differ between the messages of a step.
    """

    def __init__(self, peer: int, group: Any, device: torch.device, name: str, dynamic: bool) -> None:
        self._peer = peer
        self.name = name
        self._group = group
        self._device = device
        self._dynamic = dynamic
        self._spec: MessageSpec | None = None
        self._expected: MessageSpec | None = None

    def reset_shapes(self) -> None:
        """The next message tells its shapes again; both ends must do this."""
        self._expected = None if self._dynamic else self._spec
        self._spec = None

    def _isend(self, tensor: Tensor) -> tuple[Any, Tensor] | None:
        wire = as_bytes(tensor.detach().contiguous())
        if not wire.numel():
            return None
        try:  # no frame of an error may hold the group, which closes its sockets when it goes
            return self._group.send([wire], self._peer, 0), wire
        except RuntimeError as error:
            self._lost_peer(error)

    def _irecv(self, tensor: Tensor) -> Any | None:
        wire = as_bytes(tensor)
        if not wire.numel():
            return None
        try:
            return self._group.recv([wire], self._peer, 0)
        except RuntimeError as error:
            self._lost_peer(error)

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._lost_peer(error)

    def _lost_peer(self, error: RuntimeError) -> NoReturn:
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
        super().__init__(peer, group, device, name, dynamic)
        self._unfinished: deque[tuple[Any, Tensor]] = deque()

    def send(self, message: Message, microbatch: int) -> None:
        """Start sending; the tensors must not be written to until `drain`.

        Raises:
            DataError: other shapes than in the first message, on a channel that is not dynamic.
        """
        spec = MessageSpec.of(message)
        if self._spec is None or self._dynamic:
            self._start(messages.encode(spec, self._device, self.name))
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
        super().__init__(peer, group, device, name, dynamic)
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
            receive.spec = self._spec = messages.decode(header)
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
                header = torch.empty(messages.HEADER_LENGTH, dtype=torch.int64, device=self._device)
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
            forward = open_pair(members, "activations", device)
            backward = open_pair(members, "gradients", device)
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
        for channels in (self._forward, self._backward, self._inputs, self._output_grads):
            for channel in channels.values():
                channel.close()
