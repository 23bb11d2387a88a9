"""Agreement of all ranks on whether a step worked, so that a failure on one is the same error on all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ext.core import errors
from ext.core.errors import CommunicationError, ExtError


@dataclass(frozen=True)
class Failure:
    """What a rank saw: the class of the error, its text, and whether it only lost its peer."""

    rank: int
    kind: str
    message: str
    lost_peer: bool


class FailureGuard:
    """One small collective per step over a gloo group of all ranks.

    A rank that fails closes its channels and comes here; its neighbours lose their peer, do the same, and so
    on; ranks of other pipelines come here at the end of their step. Collective over the world: every rank
    creates it, and calls `agree` once per step, failed or not.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self.agreed = False

    def start_step(self) -> None:
        self.agreed = False

    def agree(self, error: BaseException | None) -> None:
        """Return where no rank failed, else raise the same error on every rank.

        Raises:
            ExtError: of the class and with the text of the first failing rank's error, where that is one of ours.
            CommunicationError: naming rank and error, where the error is a stranger; the failing rank itself
                re-raises what it caught.
        """
        self.agreed = True
        flag = torch.tensor(0 if error is None else 1)
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as lost:
            raise CommunicationError(f"a rank died during the step: {error or lost}") from (error or lost)
        if not flag.item():
            return
        self._raise_together(error)

    def _raise_together(self, error: BaseException | None) -> None:
        mine = None
        if error is not None:
            mine = Failure(dist.get_rank(), type(error).__name__, str(error), isinstance(error, CommunicationError))
        everyone: list[Failure | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        failures = [failure for failure in everyone if failure is not None]
        first = next((failure for failure in failures if not failure.lost_peer), failures[0])
        cls = getattr(errors, first.kind, None)
        if isinstance(cls, type) and issubclass(cls, ExtError):
            raise cls(first.message) from error
        if error is not None and first.rank == dist.get_rank():
            raise error
        raise CommunicationError(f"rank {first.rank} failed: {first.kind}: {first.message}") from error
