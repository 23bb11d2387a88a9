"""Actions as integers, for loops that run millions of times.

A code is ``(operation * num_stages + stage) * num_microbatches + microbatch``. Operations are the compute kinds,
with B and I in two forms: with the recompute inside them, or without because an R stands earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ext.pipeline.actions import Action, B, F, I, Kind, R, W

OPERATIONS: tuple[tuple[Kind, bool], ...] = (
    (F, False),
    (B, True),
    (I, True),
    (W, False),
    (R, False),
    (B, False),
    (I, False),
)
"""(kind, whether the recompute runs inside), by operation."""


class ActionCodes:
    """The code of every compute action of one placement and number of micro-batches.

    An action waits for the result of at most one other, on a neighbouring stage, and gives one result. Results
    have slots: those of F first, then the gradients, whether B or I gives them; then one that is always ready
    and one that nobody reads.

    Attributes:
        waits_for: slot of the result that an action needs, by code.
        fills: slot of the result that an action gives, by code.
        hops: whether what F of a stage, and what B or I of the stage before it, wait for comes from another rank:
            ``hops[stage]`` between ``stage - 1`` and ``stage``; one entry more than stages, both ends False.
        num_slots: number of slots; the last but one is always ready.
    """

    def __init__(self, rank_of: Sequence[int], num_microbatches: int) -> None:
        self.num_stages = len(rank_of)
        self.num_microbatches = m = num_microbatches
        self.hops = [False, *(a != b for a, b in zip(rank_of, rank_of[1:], strict=False)), False]
        span = self.num_stages * m
        self.num_slots = 2 * span + 2
        ready, unread = 2 * span, 2 * span + 1
        self.waits_for: list[int] = []
        self.fills: list[int] = []
        for kind, _ in OPERATIONS:
            if kind is F:
                self.waits_for += [ready] * m + list(range(span - m))
                self.fills += range(span)
            elif kind in (B, I):
                self.waits_for += list(range(span + m, 2 * span)) + [ready] * m
                self.fills += range(span, 2 * span)
            else:
                self.waits_for += [ready] * span
                self.fills += [unread] * span
        self._operation = {operation: index for index, operation in enumerate(OPERATIONS)}

    def code(self, action: Action, inline: bool = False) -> int:
        """The code of a compute action; ``inline`` for a B or I that recomputes inside."""
        operation = self._operation[action.kind, inline]
        return (operation * self.num_stages + action.stage) * self.num_microbatches + action.microbatch

    def encode(self, order: Iterable[Action]) -> list[int]:
        """Codes of the compute actions of one rank; B and I recompute inside where the order has no R for them."""
        compute = [action for action in order if action.kind.is_compute]
        early = {(a.stage, a.microbatch) for a in compute if a.kind is R}
        return [self.code(a, a.kind in (B, I) and (a.stage, a.microbatch) not in early) for a in compute]

    def decode(self, code: int) -> tuple[Action, bool]:
        """The action of a code, and whether it recomputes inside."""
        rest, microbatch = divmod(code, self.num_microbatches)
        operation, stage = divmod(rest, self.num_stages)
        kind, inline = OPERATIONS[operation]
        return Action(stage, kind, microbatch), inline


@lru_cache(maxsize=64)
def action_codes(rank_of: tuple[int, ...], num_microbatches: int) -> ActionCodes:
    """The codes of a placement, made once."""
    return ActionCodes(rank_of, num_microbatches)
