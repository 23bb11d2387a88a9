"""Passes: what a plan needs beyond a schedule's order, placed by rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from ext.pipeline.actions import Action, B, F, I, Kind, R
from ext.pipeline.replay import Replay

DEFAULT_LOOKAHEAD = 2
MAX_UNFINISHED_SENDS = 8
"""Messages of one channel that are kept before the oldest is waited for to leave."""


def place_recomputes(
    order: Iterable[Action], early: Collection[tuple[int, int]], recomputing: Collection[int]
) -> list[Action]:
    """One rank's order with an R before the B or I of every early recompute.

    Args:
        order: the schedule's order.
        early: (stage, micro-batch) whose R runs before its gradient arrives.
        recomputing: stages that drop something in their forward; the others get no R.
    """
    placed: list[Action] = []
    for action in order:
        key = (action.stage, action.microbatch)
        if action.kind in (B, I) and key in early and action.stage in recomputing:
            placed.append(Action(action.stage, R, action.microbatch))
        placed.append(action)
    return placed


def add_communication(
    orders: Sequence[Sequence[Action]], rank_of: Sequence[int], *, lookahead: int = DEFAULT_LOOKAHEAD
) -> tuple[tuple[Action, ...], ...]:
    """Orders with sends and receives between stages of different ranks.

    A send follows the action that makes its message. A receive is posted ``lookahead`` compute actions before
    the one that needs it: F, or the early R, else B or I; a gradient's not before the F whose outputs give
    its shape. All messages from one rank to another form a channel, and both ends keep the same order in it.
    Between two compute actions receives come first, so that no send waits for a receive that stands behind
    another send. A receive is posted earlier still where ranks would otherwise wait for ever in sends that
    block until their receive is posted.

    Args:
        orders: compute actions of every rank, by rank.
        rank_of: rank of each stage, by stage.
        lookahead: compute actions between the posting of a receive and its use; 0 posts it just before.
            Every step more holds one more input buffer.
    """
    if lookahead < 0:
        raise ValueError(f"lookahead must be at least 0, got {lookahead}")
    sends = [_sends(order, rank_of) for order in orders]
    channels: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, after in enumerate(sends):
        for send in (send for sent in after for send in sent):
            receive = _receive_of(send)
            channels[rank, rank_of[receive.stage]].append(receive)
    receives = [_receives(order, rank, channels, lookahead) for rank, order in enumerate(orders)]
    merged = [list(_merge(order, receives[rank], sends[rank])) for rank, order in enumerate(orders)]
    _untie(merged, rank_of)
    return tuple(map(tuple, merged))


def _sends(order: Sequence[Action], rank_of: Sequence[int]) -> list[list[Action]]:
    """Sends that follow each action."""
    sends: list[list[Action]] = []
    for action in order:
        stage, sent = action.stage, []
        if action.kind is F and stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]:
            sent = [Action(stage, Kind.SEND_F, action.microbatch)]
        elif action.kind in (B, I) and stage > 0 and rank_of[stage - 1] != rank_of[stage]:
            sent = [Action(stage, Kind.SEND_B, action.microbatch)]
        sends.append(sent)
    return sends


def _receive_of(send: Action) -> Action:
    """The receive on the other end of a send."""
    if send.kind is Kind.SEND_F:
        return Action(send.stage + 1, Kind.RECV_F, send.microbatch)
    return Action(send.stage - 1, Kind.RECV_B, send.microbatch)


def _receives(
    order: Sequence[Action], rank: int, channels: dict[tuple[int, int], list[Action]], lookahead: int
) -> list[list[Action]]:
    """Receives posted before each action of one rank."""
    index = {action: k for k, action in enumerate(order)}
    posts: list[list[Action]] = [[] for _ in order]
    for (_, destination), receives in channels.items():
        if destination != rank:
            continue
        latest = [_first_use(receive, index) for receive in receives]
        # Posted no later than any message behind it in the channel is needed ...
        latest = list(accumulate(reversed(latest), min))[::-1]
        before = 0
        for receive, limit in zip(receives, latest, strict=True):
            wanted = limit - lookahead
            if receive.kind is Kind.RECV_B:
                wanted = max(wanted, index[Action(receive.stage, F, receive.microbatch)] + 1)
            # ... and no earlier than the one before it.
            before = min(limit, max(wanted, before))
            posts[before].append(receive)
    return posts


def _first_use(receive: Action, index: dict[Action, int]) -> int:
    """Where in the order a received message must have been posted at the latest."""
    kinds = (F,) if receive.kind is Kind.RECV_F else (R, B, I)
    uses = [index.get(Action(receive.stage, kind, receive.microbatch)) for kind in kinds]
    return min(use for use in uses if use is not None)


def _merge(
    order: Sequence[Action], receives: Sequence[Sequence[Action]], sends: Sequence[Sequence[Action]]
) -> Iterable[Action]:
    pending: Sequence[Action] = ()
    for action, posted, sent in zip(order, receives, sends, strict=True):
        yield from posted
        yield from pending
        yield action
        pending = sent
    yield from pending


def _untie(orders: list[list[Action]], rank_of: Sequence[int]) -> None:
    """Post receives earlier where blocking sends would wait for ever, in place.

    Where all ranks wait, the receive that the first of the waiting sends needs moves to where its rank is. It is
    the next one of its channel, as the sends before it went through, so both ends keep one order.
    """
    replay = Replay(orders, rank_of)
    while stuck := replay.run():
        for rank in stuck:
            action = orders[rank][replay.position[rank]]
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                receive = _receive_of(action)
                receiver = rank_of[receive.stage]
                orders[receiver].remove(receive)
                orders[receiver].insert(replay.position[receiver], receive)
                break
        else:
            return  # The orders themselves wait for each other; the validator shows where.
