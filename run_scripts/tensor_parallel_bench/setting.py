"""What is measured: the stage, its links, and what a rank gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One stage of equal layers that two ranks share.

    Attributes:
        hidden, heads, seq, micro_batch, num_layers: of the stage.
        num_microbatches: of a step, one more forward than backwards in flight.
        ratios: one all-reduce over the compute of one layer's forward; where the link cannot be shaped, none.
        keep_share: bytes that tables may keep, as a share of what no recompute keeps.
        repeats: turns, in which all modes are timed once.
        namespaces: of the two ranks; empty for this machine's loopback.
        store: file by which the ranks find each other.
    """

    hidden: int
    heads: int
    seq: int
    micro_batch: int
    num_layers: int
    num_microbatches: int
    ratios: tuple[float, ...]
    keep_share: float
    repeats: int
    namespaces: tuple[str, ...] = ()
    store: str = ""


@dataclass
class Outcome:
    """Times at one rate of the link.

    Attributes:
        ratio: measured: one all-reduce over the compute of one layer's forward.
        times: seconds of every turn, by mode.
        held: bytes of one micro-batch after its forward, by mode.
        windows: planned and measured seconds by window, of the overlapped mode.
    """

    ratio: float
    all_reduce: float
    forward: float
    times: dict[str, list[float]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    windows: list[dict[str, Any]] = field(default_factory=list)
