"""Tables: what a policy decides for every unit of a layer, as data that can be stored and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ext.recompute.windows import ON_DEMAND

KEEP = "keep"
UNUSED = "unused"
"""Neither kept nor recomputed: nothing that is recomputed reads it, nor does the backward."""

OPAQUE = "layer"
"""The single unit that a layer without units is to tables and solvers."""


@dataclass(frozen=True)
class UnitTable:
    """Unit -> `KEEP`, the name of the window that recomputes it, `ON_DEMAND`, or `UNUSED`.

    A unit that the table does not name is kept. A table may be stale or wrong: engines take names that they do not
    know as advice that does not apply, so it costs time or memory, never correctness.
    """

    decisions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, decisions: Mapping[str, str]) -> UnitTable:
        return cls(tuple(decisions.items()))

    @cached_property
    def _by_unit(self) -> dict[str, str]:
        return dict(self.decisions)

    def __getitem__(self, unit: str) -> str:
        return self._by_unit.get(unit, KEEP)

    @property
    def dropped(self) -> frozenset[str]:
        """Units that the forward does not keep."""
        return frozenset(unit for unit, decision in self.decisions if decision != KEEP)

    def recomputed(self, window: str) -> tuple[str, ...]:
        """Units that ``window`` recomputes."""
        return tuple(unit for unit, decision in self.decisions if decision == window)

    def to_json(self) -> dict[str, str]:
        return dict(self.decisions)


def keep_all(names: Iterable[str]) -> UnitTable:
    """The table that recomputes nothing."""
    return UnitTable.of(dict.fromkeys(names, KEEP))


def drop(names: Iterable[str], window: str = ON_DEMAND) -> UnitTable:
    """The table that recomputes these units in one window and keeps the others."""
    return UnitTable.of(dict.fromkeys(names, window))
