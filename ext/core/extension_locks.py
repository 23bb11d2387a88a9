"""Locks of torch's extension builds: a killed build leaves one behind, and every later run waits without a word."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_DEPTH = 3
"""Folders below the root in which a lock may lie: the build, under a folder per Python and CUDA version."""
YOUNG_SECONDS = 900.0
"""A build that no process here holds may still run on another node or in another container for this long."""


@dataclass(frozen=True)
class ExtensionLock:
    """The lock of one extension's build.

    Attributes:
        path: the file that builds wait for.
        age_seconds: time since it was made.
        holders: ids of the processes on this machine that build, torch keeps the file open in them.
        certain: False where processes could not be looked at, so that a holder may be hidden.
    """

    path: Path
    age_seconds: float
    holders: tuple[int, ...]
    certain: bool

    @property
    def extension(self) -> str:
        return self.path.parent.name

    @property
    def is_stale(self) -> bool:
        """Nobody builds: no process of this machine has it open, and it is old enough for other machines too."""
        return not self.holders and self.age_seconds > YOUNG_SECONDS


def extension_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where torch builds extensions."""
    set_root = environ.get("TORCH_EXTENSIONS_DIR")
    if set_root:
        return Path(set_root)
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def find_locks(environ: Mapping[str, str] = os.environ) -> list[ExtensionLock]:
    """All locks under the extension folder, the oldest first. Reads the open files of all processes."""
    paths = sorted(_locks_below(extension_root(environ), MAX_DEPTH))
    if not paths:
        return []
    holders, certain = _holders(paths)
    now = time.time()
    locks = []
    for path in paths:
        try:
            made = path.stat().st_mtime
        except OSError:  # The build ended meanwhile.
            continue
        locks.append(ExtensionLock(path, max(0.0, now - made), tuple(holders.get(path, ())), certain))
    return sorted(locks, key=lambda lock: -lock.age_seconds)


def waiting_for(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line per lock that a run started now would wait for, for a launcher to print; empty when it won't wait."""
    lines = []
    for lock in find_locks(environ):
        wait = f"waiting for the build of extension '{lock.extension}': lock {lock.path}, {age(lock.age_seconds)} old"
        if lock.holders:
            lines.append(f"{wait}, held by process {', '.join(map(str, lock.holders))}")
        else:
            lines.append(f"{wait}, held by no process here. If no other machine builds it: rm {lock.path}")
    return lines


def age(seconds: float) -> str:
    """``seconds`` in the largest unit that fits."""
    for unit, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _locks_below(folder: Path, depth: int) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return []
    locks = [Path(entry.path) for entry in found if entry.name == "lock" and entry.is_file()]
    if depth > 1:
        locks += (lock for entry in found if entry.is_dir() for lock in _locks_below(Path(entry.path), depth - 1))
    return locks


def _holders(paths: list[Path]) -> tuple[dict[Path, list[int]], bool]:
    """Processes that have each path open, and whether every process could be looked at."""
    by_identity = {}
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        by_identity[stat.st_dev, stat.st_ino] = path
    holders: dict[Path, list[int]] = {}
    try:
        processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return holders, False
    certain = True
    for process in processes:
        try:
            files = os.listdir(f"/proc/{process}/fd")
        except PermissionError:
            certain = False
            continue
        except OSError:  # It ended meanwhile.
            continue
        for file in files:
            try:
                stat = os.stat(f"/proc/{process}/fd/{file}")
            except OSError:
                continue
            path = by_identity.get((stat.st_dev, stat.st_ino))
            if path is not None:
                holders.setdefault(path, []).append(process)
    return holders, certain
