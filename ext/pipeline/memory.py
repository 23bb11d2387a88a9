"""How much one rank holds at once, read off its order: the heaviest moments as small vectors of counts.

`ext.pipeline.timing` counts the same memory action by action. A search that tries many sizes for one order needs
only the few moments that can be the heaviest, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ext.pipeline.actions import Action, B, F, I, Kind, R, W
from ext.pipeline.costs import StageCosts


class Load(NamedTuple):
    """What a rank with one stage holds at some moment, counted in micro-batches.

    Attributes:
        kept: those that hold what the forward leaves: all that it does not drop, and the stash.
        recomputed: those of them whose dropped part has been brought back.
        working: 1 within a B that recomputes inside, else 0.
        waiting: those between I and W.
        splitting: 1 within an I that recomputes inside, else 0.
        growing: 1 within any other I, else 0.
    """

    kept: int
    recomputed: int = 0
    working: int = 0
    waiting: int = 0
    splitting: int = 0
    growing: int = 0

    def size(self, stage: StageCosts) -> float:
        """In the unit of the stage's activations."""
        split = stage.split_memory
        return (
            self.kept * stage.kept
            + self.recomputed * stage.dropped
            + self.working * stage.working_set
            + self.waiting * split.waiting
            + self.splitting * split.working_set
            + self.growing * split.growth
        )


def heaviest_loads(order: Iterable[Action], within: Kind | None = None) -> tuple[Load, ...]:
    """The moments of a rank's order of which none holds less of everything than another.

    The order is that of a rank with one stage, which recomputes; with no R in it, every backward recomputes inside.
    Only actions of the kind ``within`` count where one is given.
    """
    moments = {load for kind, load in _loads(order) if within in (None, kind)}
    return tuple(sorted(load for load in moments if not any(_covers(other, load) for other in moments)))


def _loads(order: Iterable[Action]) -> Iterator[tuple[Kind, Load]]:
    actions = [action for action in order if action.kind.is_compute]
    early = {action.microbatch for action in actions if action.kind is R}
    kept = recomputed = waiting = 0
    for kind, microbatch in ((action.kind, action.microbatch) for action in actions):
        inline = kind in (B, I) and microbatch not in early
        if kind is F:
            kept += 1
        elif kind is R:
            recomputed += 1
        working, splitting, growing = kind is B and inline, kind is I and inline, kind is I and not inline
        yield kind, Load(kept, recomputed, int(working), waiting, int(splitting), int(growing))
        if kind in (B, I):
            kept -= 1
            recomputed -= not inline
        waiting += (kind is I) - (kind is W)


def peak(loads: Iterable[Load], stage: StageCosts) -> float:
    """The most that the rank holds at once, in the unit of the stage's activations."""
    return max(load.size(stage) for load in loads)


def in_flight(loads: Iterable[Load]) -> int:
    """Most micro-batches that hold activations at once, be it for their W."""
    return max(load.kept + load.waiting for load in loads)


def _covers(one: Load, other: Load) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
