"""Actions: what one pipeline rank does, one small item after another, as data and as text.

The letters are those of torch.distributed.pipelining; zero-bubble papers write B for our I.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from ext.core.errors import ScheduleError


class Kind(str, Enum):
    """What an action does. A new kind is one line here and one handler in each host engine."""

    F = "F"  # forward
    B = "B"  # full backward, I and W fused
    I = "I"  # gradient of the inputs
    W = "W"  # gradient of the weights
    R = "R"  # recompute what the forward dropped
    SEND_F = "SEND_F"  # start sending the activations of this stage
    RECV_F = "RECV_F"  # post the receive of this stage's inputs; F waits for it
    SEND_B = "SEND_B"  # start sending the gradient of this stage's inputs
    RECV_B = "RECV_B"  # post the receive of the gradient of this stage's outputs; B or I waits for it

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE_KINDS

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__  # Enum's own is a Python function, slow where plans have 10^5 actions


F, B, I, W, R = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R
COMPUTE_KINDS = frozenset((F, B, I, W, R))
_TEXT = re.compile(rf"(\d+)({'|'.join(sorted((kind.value for kind in Kind), key=len, reverse=True))})(\d+)")


class Action(NamedTuple):
    """One step of a rank: ``2F0`` is stage 2, forward, micro-batch 0.

    A stage is the index of a model chunk; which rank holds it is the placement's business.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            ScheduleError: the text is no action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            kinds = " ".join(kind.value for kind in Kind)
            raise ScheduleError(f"'{text}' is no action; write stage, kind, micro-batch as in 2F0. Kinds: {kinds}.")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


def format_order(order: Iterable[Action]) -> str:
    """Actions as text, separated by blanks."""
    return " ".join(map(str, order))


def parse_order(text: str) -> list[Action]:
    """The inverse of `format_order`."""
    return [Action.parse(word) for word in text.split()]
