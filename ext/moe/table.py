"""Times of linear and hierarchical dispatch by message size, in memory and in a file."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

logger = logging.getLogger(__name__)

MARGIN = 0.02
"""Two hops must win by this share; a tie stays linear."""


@dataclass(frozen=True)
class Table:
    """Seconds of one dispatch and combine, by message size.

    Attributes:
        sizes: bytes that a rank sends per all-to-all, its own share included, ascending.
        linear: seconds at each size.
        hierarchical: seconds at each size.
    """

    sizes: tuple[int, ...]
    linear: tuple[float, ...]
    hierarchical: tuple[float, ...]

    def times_at(self, size: int) -> tuple[float, float]:
        """Linear and hierarchical seconds at ``size``; interpolated in logarithms, constant outside."""
        return _at(size, self.sizes, self.linear), _at(size, self.sizes, self.hierarchical)

    def extended(self, size: int, linear: float, hierarchical: float) -> Table:
        """With one more size, larger than all others."""
        return Table((*self.sizes, size), (*self.linear, linear), (*self.hierarchical, hierarchical))

    def prefers_hierarchical(self, size: int) -> bool:
        """Whether two hops are faster at ``size``, by more than a tie."""
        one, two = self.times_at(size)
        return two < one * (1 - MARGIN)


def read_table(path: Path, key: str) -> tuple[Table | None, str]:
    """The entry of ``key``, None where there is none; and what is wrong with the file, empty if nothing is."""
    if not path.exists():
        return None, ""
    try:
        entry = json.loads(path.read_text()).get(key)
        if entry is None:
            return None, ""
        table = Table(*(tuple(entry[name]) for name in ("sizes", "linear", "hierarchical")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"cannot be read: {error!r}."
    lengths = {len(table.sizes), len(table.linear), len(table.hierarchical)}
    numbers = [*table.sizes, *table.linear, *table.hierarchical]
    is_valid = len(lengths) == 1 and 0 not in lengths and all(isinstance(n, (int, float)) and n > 0 for n in numbers)
    if not is_valid or any(a >= b for a, b in pairwise(table.sizes)):
        return None, f"the entry '{key}' does not hold ascending sizes and as many times, all above 0."
    return table, ""


def write_table(path: Path, key: str, table: Table) -> None:
    """Put the entry of ``key`` into the file, which need not exist."""
    try:
        tables = json.loads(path.read_text()) if path.exists() else {}
        tables[key] = asdict(table)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(tables, indent=1) + "\n")
        part.replace(path)
    except OSError as error:  # the measurement stands; only later runs miss it
        logger.warning("ext.moe.dispatcher.probe_file: %s cannot be written: %s", path, error)


def _at(size: int, sizes: Sequence[int], times: Sequence[float]) -> float:
    if size <= sizes[0]:
        return times[0]
    for (low, high), (before, after) in zip(pairwise(sizes), pairwise(times), strict=True):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(before) + share * math.log(after))
    return times[-1]
