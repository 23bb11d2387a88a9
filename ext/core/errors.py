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


class ScheduleError(ExtError, ValueError):
    """A plan is incomplete, out of order, over its in-flight bound, or would deadlock."""


class PatchError(ExtError, RuntimeError):
    """A host function cannot be replaced: unknown version, missing name, or changed signature."""


class CommunicationError(ExtError, RuntimeError):
    """A rank failed or stopped answering while the others waited for it."""


class DataError(ExtError, RuntimeError):
    """The training data cannot be used: unreadable, empty, too short or of the wrong shape."""


class CheckpointError(ExtError, RuntimeError):
    """A checkpoint cannot be read or written; the file is named."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest allowed name, else an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
