"""A static replay of orders in which every send blocks until its receive is posted.

Receives do not block. F, and B or I, block until what they need was sent, or made on the same rank. No times: only
who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence

from ext.pipeline.actions import Action, B, F, I, Kind


class Replay:
    """Runs orders as far as they go. The orders may be changed from the current positions on between two runs.

    Attributes:
        position: index of the action that each rank is at, by rank.
    """

    def __init__(self, orders: Sequence[Sequence[Action]], rank_of: Sequence[int]) -> None:
        self.orders = orders
        self.position = [0] * len(orders)
        self._rank_of = rank_of
        self._done: set[Action] = set()
        self._waiting: dict[Action, int] = {}

    def run(self) -> list[int]:
        """Go on until every rank is at its end or waits; returns the ranks that wait."""
        runnable = list(range(len(self.orders)))
        done, waiting = self._done, self._waiting
        while runnable:
            rank = runnable.pop()
            order = self.orders[rank]
            for step in range(self.position[rank], len(order)):
                action = order[step]
                need = needed_by(action, self._rank_of)
                if need is not None and need not in done:
                    waiting[need] = rank
                    self.position[rank] = step
                    break
                if action.kind is I:
                    action = Action(action.stage, B, action.microbatch)
                done.add(action)
                if action in waiting:
                    runnable.append(waiting.pop(action))
            else:
                self.position[rank] = len(order)
        return [rank for rank, order in enumerate(self.orders) if self.position[rank] < len(order)]


def needed_by(action: Action, rank_of: Sequence[int]) -> Action | None:
    """What an action waits for in the replay; a gradient is told by the B of its stage, also where I makes it."""
    stage, kind, microbatch = action
    if kind is Kind.SEND_F:
        return Action(stage + 1, Kind.RECV_F, microbatch)
    if kind is Kind.SEND_B:
        return Action(stage - 1, Kind.RECV_B, microbatch)
    if kind is F and stage > 0:
        return Action(stage - 1, F if rank_of[stage - 1] == rank_of[stage] else Kind.SEND_F, microbatch)
    if kind in (B, I) and stage + 1 < len(rank_of):
        return Action(stage + 1, B if rank_of[stage + 1] == rank_of[stage] else Kind.SEND_B, microbatch)
    return None
