"""The error tree. Every message says what was found, what is allowed and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ExtError(Exception):
    """Base of every error this package raises for something the user can change."""


class ConfigError(ExtError, ValueError):
    """A key or value of the configuration cannot work; lists all violations at once."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class InfeasibleError(ExtError, RuntimeError):
    """What is asked is well-formed, but nothing fits it; says what would."""


class ScheduleError(ExtError, ValueError):
    """A plan is incomplete, out of order, over its in-flight bound, or would deadlock."""


class PatchError(ExtError, RuntimeError):
    """A host function cannot be replaced: unknown version, missing name, or changed signature."""


class CommunicationError(ExtError, RuntimeError):
    """A rank failed or stopped answering while the others waited for it."""


class RoutingError(ExtError, RuntimeError):
    """A router's logits cannot be used, or the ranks of an expert-parallel group do not agree on a call."""


class DataError(ExtError, RuntimeError):
    """The training data cannot be used: unreadable, empty, too short or of the wrong shape."""


class OutOfMemoryError(ExtError, RuntimeError):
    """A rank needs more memory than it has or was given; names the stage, the figures and a change that fits."""


class CheckpointError(ExtError, RuntimeError):
    """A checkpoint cannot be read or written; the file is named."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest allowed name, else an empty string."""
    close = nearest_name(name, allowed)
    return f" Did you mean '{close}'?" if close else ""


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """The closest allowed name, whatever its case, or None where nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(name[:100].lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None
