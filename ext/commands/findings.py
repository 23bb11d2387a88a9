"""What `doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "info", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``error`` where no run can work or every one would hang, ``warning`` where some would,
            ``info`` where something to know, ``ok`` otherwise.
        what: what was found.
        fix: what to do about it, empty where nothing is to do.
    """

    level: Level
    what: str
    fix: str = ""
