"""Agreement of all ranks on whether a step worked, so that a failure on one is the same error on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ext.core import errors
from ext.core.errors import CommunicationError, ExtError
from ext.runtime.alarm import Alarm

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What a rank saw: the class of the error, its text, and whether it only lost its peer."""

    rank: int
    kind: str
    message: str
    lost_peer: bool


class FailureGuard:
    """One small collective per step over a gloo group of all ranks, in log2(ranks) exchanges.

    A rank that fails closes its channels and comes here; its neighbours lose their peer, do the same, and so
    on; ranks of other pipelines come here at the end of their step. Collective over the world: every rank
    creates it, and calls `agree` once per step, failed or not.

    Attributes:
        alarm: rung by a rank that fails, where others may wait for it inside a collective and never come here.
    """

    def __init__(self) -> None:
        self.alarm: Alarm | None = None
        self._group: Any = dist.new_group(backend="gloo")
        self._posted: list[tuple[Any, Tensor]] = []
        self.agreed = False

    def start_step(self) -> None:
        self.agreed = False
        self._post()

    def agree(self, error: BaseException | None) -> None:
        """Return where no rank failed, else raise the same error on every rank.

        Raises:
            ExtError: of the class and with the text of the first failing rank's error, where that is one of ours.
            CommunicationError: naming rank and error, where the error is a stranger; the failing rank itself
                re-raises what it caught.
        """
        self.agreed = True
        if self.alarm is not None and error is not None and not isinstance(error, CommunicationError):
            self.alarm.ring(error)
        try:
            some_failed = self._on_any_rank(error is not None)
        except RuntimeError as lost:
            raise CommunicationError(f"a rank died during the step: {error or lost}") from (error or lost)
        if some_failed:
            self._raise_together(error)

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """What ``make()`` gives or raises on rank 0, on every rank; errors that are not ours as `agree` has them.

        Outside of a step. Collective over the world; the value must be picklable.
        """
        made: list[Any] = [None]
        failure: Exception | None = None
        if dist.get_rank() == 0:
            try:
                made[0] = make()
            except ExtError as error:
                made[0] = error
            except Exception as error:  # noqa: BLE001 - raised again, on every rank
                failure = error
        self.start_step()
        self.agree(failure)
        dist.broadcast_object_list(made, src=0)
        outcome: Any = made[0]
        if isinstance(outcome, ExtError):
            raise outcome
        return outcome

    def _on_any_rank(self, mine: bool) -> bool:
        """Whether it is true on any rank.

        In exchange k every rank tells the one 2^k behind it what it knows, and learns from the one 2^k before it. An
        all-reduce of gloo's would go round all ranks twice, one after another.
        """
        self._post()
        posted, self._posted = self._posted, []
        known, sent = mine, []
        for k, (work, told) in enumerate(posted):
            message = torch.tensor([known])
            to = (dist.get_rank() + 2**k) % dist.get_world_size()
            sent.append((dist.isend(message, to, group=self._group, tag=k), message))
            work.wait()
            known = known or bool(told.item())
        for work, _ in sent:
            work.wait()
        return known

    def _post(self) -> None:
        """Post the receives of the next agreement, so that no message waits for its receive."""
        if self._posted:
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for k in range((world_size - 1).bit_length()):
            told = torch.empty(1, dtype=torch.bool)
            self._posted.append((dist.irecv(told, (rank - 2**k) % world_size, group=self._group, tag=k), told))

    def _raise_together(self, error: BaseException | None) -> None:
        mine = None
        if error is not None:
            mine = Failure(dist.get_rank(), type(error).__name__, str(error), isinstance(error, CommunicationError))
        everyone: list[Failure | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        if self.alarm is not None:
            self.alarm.settle()
        failures = [failure for failure in everyone if failure is not None]
        first = next((failure for failure in failures if not failure.lost_peer), failures[0])
        cls = getattr(errors, first.kind, None)
        if isinstance(cls, type) and issubclass(cls, ExtError):
            raise cls(first.message) from error
        if error is not None and first.rank == dist.get_rank():
            raise error
        raise CommunicationError(f"rank {first.rank} failed: {first.kind}: {first.message}") from error
