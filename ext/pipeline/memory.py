"""How much one rank holds at once, read off its order: the heaviest moments as small vectors of counts.

`ext.pipeline.timing` counts the same memory action by action. A search that tries many sizes for one order needs
only the few moments that can be the heaviest, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ext.pipeline.actions import Action, B, F, I, R, W
from ext.pipeline.costs import StageCosts


class Load(NamedTuple):
    """What a rank with one stage holds at some moment, counted in micro-batches.

    Attributes:
        kept: those that hold what the forward does not drop.
        stash: those that hold what stays in place of the dropped part.
        recomputed: those whose dropped part has been brought back.
        working: 1 within a backward that recomputes inside, else 0.
    """

    kept: int
    stash: int
    recomputed: int
    working: int

    def size(self, stage: StageCosts) -> float:
        """In the unit of the stage's activations."""
        return (
            self.kept * (stage.activations - stage.dropped)
            + self.stash * stage.stash
            + self.recomputed * stage.dropped
            + self.working * stage.working_set
        )


def heaviest_loads(order: Iterable[Action]) -> tuple[Load, ...]:
    """The moments of a rank's order of which none holds less of everything than another.

    The order is that of a rank with one stage, which recomputes; with no R in it, every backward recomputes inside.
    """
    actions = [action for action in order if action.kind.is_compute]
    early = {action.microbatch for action in actions if action.kind is R}
    kept = stash = recomputed = 0
    moments: set[Load] = set()
    for kind, microbatch in ((action.kind, action.microbatch) for action in actions):
        inline = kind in (B, I) and microbatch not in early
        if kind is F:
            kept, stash = kept + 1, stash + 1
        elif kind is R or (kind is I and inline):
            recomputed += 1
        moments.add(Load(kept, stash, recomputed, int(kind is B and inline)))
        if kind in (B, I):
            stash -= 1
        if kind in (B, W):
            kept -= 1
            recomputed -= not (kind is B and inline)
    return tuple(sorted(load for load in moments if not any(_covers(other, load) for other in moments)))


def peak(loads: Iterable[Load], stage: StageCosts) -> float:
    """The most that the rank holds at once, in the unit of the stage's activations."""
    return max(load.size(stage) for load in loads)


def in_flight(loads: Iterable[Load]) -> int:
    """Most micro-batches that hold activations at once."""
    return max(load.kept for load in loads)


def _covers(one: Load, other: Load) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
