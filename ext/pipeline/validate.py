"""The validator: proves that a plan is complete, in order, within its in-flight bound, and ends.

A plan that passes ends even where every send blocks until its receive is posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ext.core.errors import ScheduleError
from ext.pipeline.actions import Action, B, F, I, Kind, R, W
from ext.pipeline.plan import Plan
from ext.pipeline.replay import Replay, needed_by

MAX_SHOWN = 5
"""Problems listed in one error; the rest are counted."""

_BEFORE, _AFTER = 8, 4
"""Cells shown around the bad one."""

_REQUIRED = {B: F, I: F, R: F, W: I}
"""What must stand before a compute action on its rank."""

_IN_FLIGHT = {F: 1, B: -1, W: -1}
"""What an action adds to the micro-batches in flight."""

_MADE_BY = {Kind.SEND_F: F, Kind.SEND_B: B, Kind.RECV_B: F}
"""What must stand before a communication."""

_RECEIVED_BY = {F: Kind.RECV_F, B: Kind.RECV_B, I: Kind.RECV_B}
"""The receive that must stand before a compute action."""


def validate(plan: Plan, max_in_flight: Sequence[int] | None = None) -> None:
    """Check everything below.

    Args:
        plan: with communication.
        max_in_flight: bound of each rank on micro-batches that have run F but not finished B or W.

    Raises:
        ScheduleError: the plan is incomplete, out of order, over the bound, or would not end.
    """
    check_compute(plan, max_in_flight)
    check_communication(plan)
    check_progress(plan)


def check_compute(plan: Plan, max_in_flight: Sequence[int] | None = None) -> None:
    """Every micro-batch runs once per stage: F, then B or I and W; at most one R between; within the bound.

    Raises:
        ScheduleError: with rank, step, reason and the rank's line, the bad cell in brackets.
    """
    problems = []
    for rank in range(plan.num_ranks):
        bound = None if max_in_flight is None else max_in_flight[rank]
        problems += _compute_problems(plan, rank, bound)
    _raise_if_any(problems)


def check_communication(plan: Plan) -> None:
    """Every message between ranks is sent once and received once, in one order on both ends of a channel.

    A send comes after the action that makes the message and a receive before the one that uses it; the
    receive of a gradient comes after the F whose outputs give its shape.

    Raises:
        ScheduleError: as `check_compute`.
    """
    problems = []
    for rank in range(plan.num_ranks):
        problems += _message_problems(plan, rank)
    _raise_if_any(problems)
    _raise_if_any(list(_channel_problems(plan)))


def check_progress(plan: Plan) -> None:
    """The plan ends even where every send blocks until its receive is posted (see `ext.pipeline.replay`).

    Raises:
        ScheduleError: some ranks wait for each other for ever; each of them is shown.
    """
    replay = Replay(plan.orders, plan.rank_of)
    problems = []
    for rank in replay.run():
        step = replay.position[rank]
        action = plan.orders[rank][step]
        reason = f"{action} waits for {needed_by(action, plan.rank_of)} for ever"
        problems.append(_problem(plan, rank, step, reason))
    _raise_if_any(problems)


def _compute_problems(plan: Plan, rank: int, bound: int | None) -> Iterator[str]:
    order = plan.orders[rank]
    present = {action for action in order if action.kind.is_compute}
    done: set[Action] = set()
    in_flight = 0
    for step, action in enumerate(order):
        if not action.kind.is_compute:
            continue
        reason = _misplaced(plan, rank, action)
        if reason is None and action in done:
            reason = f"{action} comes twice"
        if reason is not None:
            yield _problem(plan, rank, step, reason)
            continue
        done.add(action)
        stage, kind, microbatch = action
        required = _REQUIRED.get(kind)
        if required is not None and (stage, required, microbatch) not in done:
            missing = Action(stage, required, microbatch)
            how = "comes before" if missing in present else "comes without"
            yield _problem(plan, rank, step, f"{action} {how} {missing}")
        elif kind is R and not done.isdisjoint(((stage, B, microbatch), (stage, I, microbatch))):
            yield _problem(plan, rank, step, f"{action} comes after the backward it is for")
        elif kind is R and plan.recomputed_layers[stage] == 0:
            yield _problem(plan, rank, step, f"{action} has nothing to recompute, stage {stage} keeps all")
        elif kind in (I, W) and (stage, B, microbatch) in present:
            yield _problem(plan, rank, step, f"{action} repeats a part of {Action(stage, B, microbatch)}")
        in_flight += _IN_FLIGHT.get(kind, 0)
        if kind is F and bound is not None and in_flight > bound:
            yield _problem(plan, rank, step, f"{action} makes {in_flight} micro-batches in flight, at most {bound}")
    for stage in plan.stages_of(rank):
        for microbatch in range(plan.num_microbatches):
            kinds = (F, I, W) if (stage, I, microbatch) in present else (F, B)
            for kind in kinds:
                if (stage, kind, microbatch) not in present:
                    yield _missing(plan, rank, Action(stage, kind, microbatch))


def _misplaced(plan: Plan, rank: int, action: Action) -> str | None:
    if action.stage >= plan.num_stages:
        return f"{action} names stage {action.stage}, the stages are 0 to {plan.num_stages - 1}"
    if plan.rank_of[action.stage] != rank:
        return f"{action} belongs to rank {plan.rank_of[action.stage]}, which holds stage {action.stage}"
    if action.microbatch >= plan.num_microbatches:
        return f"{action} names micro-batch {action.microbatch}, there are 0 to {plan.num_microbatches - 1}"
    return None


def _message_problems(plan: Plan, rank: int) -> Iterator[str]:
    order = plan.orders[rank]
    expected = set(_messages(plan, rank))
    done: set[Action] = set()
    for step, action in enumerate(order):
        stage, kind, microbatch = action
        if not kind.is_compute and action not in expected:
            yield _problem(plan, rank, step, f"{action} carries no message between ranks")
        elif not kind.is_compute and action in done:
            yield _problem(plan, rank, step, f"{action} comes twice")
        made_by, receive = _MADE_BY.get(kind), _RECEIVED_BY.get(kind)
        if made_by is not None and (stage, made_by, microbatch) not in done:
            yield _problem(plan, rank, step, f"{action} comes before {Action(stage, made_by, microbatch)}")
        needed = (stage, receive, microbatch)
        if needed in expected and needed not in done:
            yield _problem(plan, rank, step, f"{action} comes before its receive {stage}{receive}{microbatch}")
        done.add(Action(stage, B, microbatch) if kind is I else action)
    for message in sorted(expected - done):
        yield _missing(plan, rank, message)


def _messages(plan: Plan, rank: int) -> Iterator[Action]:
    """All sends and receives that a rank needs."""
    for stage in plan.stages_of(rank):
        kinds = []
        if stage > 0 and plan.rank_of[stage - 1] != rank:
            kinds += [Kind.RECV_F, Kind.SEND_B]
        if stage + 1 < plan.num_stages and plan.rank_of[stage + 1] != rank:
            kinds += [Kind.SEND_F, Kind.RECV_B]
        yield from (Action(stage, kind, i) for kind in kinds for i in range(plan.num_microbatches))


def _channel_problems(plan: Plan) -> Iterator[str]:
    """The first receive of each channel that stands where another message arrives."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    posted: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, order in enumerate(plan.orders):
        for step, action in enumerate(order):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                receive = needed_by(action, plan.rank_of)
                assert receive is not None
                sent[rank, plan.rank_of[receive.stage]].append(receive)
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                source = action.stage + (1 if action.kind is Kind.RECV_B else -1)
                posted[plan.rank_of[source], rank].append((step, action))
    for (source, destination), receives in posted.items():
        for (step, receive), arriving in zip(receives, sent[source, destination], strict=True):
            if receive != arriving:
                reason = f"{receive} is posted where rank {source} sends what {arriving} receives"
                yield _problem(plan, destination, step, reason)
                break


def _problem(plan: Plan, rank: int, step: int, reason: str) -> str:
    order = plan.orders[rank]
    first, last = max(0, step - _BEFORE), step + 1 + _AFTER
    cells = ["..."] if first else []
    cells += [str(action) for action in order[first:step]]
    cells += [f"[{order[step]}]", *map(str, order[step + 1 : last])]
    cells += ["..."] if last < len(order) else []
    return f"rank {rank}, step {step + 1}: {reason}.\n  rank {rank}:  {' '.join(cells)}"


def _missing(plan: Plan, rank: int, action: Action) -> str:
    order = plan.orders[rank]
    cells = ["..."] if len(order) > _BEFORE else []
    cells += map(str, order[-_BEFORE:])
    return f"rank {rank}: {action} is missing.\n  rank {rank}:  {' '.join(cells)} [{action}?]"


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        more = [f"... and {len(problems) - MAX_SHOWN} more."] if len(problems) > MAX_SHOWN else []
        raise ScheduleError("\n".join([*problems[:MAX_SHOWN], *more]))
