"""Where stages live. Only this file may know that a linear pipeline has stage == rank."""

from __future__ import annotations


def linear(num_ranks: int) -> tuple[int, ...]:
    """The rank of every stage where rank r holds stage r alone."""
    return tuple(range(num_ranks))
