"""The plan: everything that host engine, simulator, validator, planner and trace share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ext.pipeline.actions import Action, Kind, format_order, parse_order

UnitDecisions = tuple[tuple[str, str], ...]
"""Of one layer: pairs of a unit's name and what is done with it, see `ext.recompute.table`."""


@dataclass(frozen=True)
class PipelineShape:
    """Pipeline ranks and micro-batches per step."""

    num_ranks: int
    num_microbatches: int


@dataclass(frozen=True)
class Plan:
    """One ordered list of actions per pipeline rank, with the layout it was made for.

    Attributes:
        schedule: registered name of the schedule.
        num_microbatches: micro-batches per step.
        rank_of: rank of each stage, by stage.
        orders: actions of each rank, by rank, communication included.
        layers_per_stage: layers of each stage, by stage.
        recomputed_layers: how many of these the forward drops and R (or B, I) re-runs, by stage; with unit tables, how
            many recompute something.
        unit_tables: where recomputation is decided unit by unit, the decisions of every layer, by stage; else empty.
    """

    schedule: str
    num_microbatches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    layers_per_stage: tuple[int, ...]
    recomputed_layers: tuple[int, ...]
    unit_tables: tuple[tuple[UnitDecisions, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` holds, in model order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def compute_order(self, rank: int) -> tuple[Action, ...]:
        """The rank's actions without communication."""
        return tuple(action for action in self.orders[rank] if action.kind.is_compute)

    @cached_property
    def early_recomputes(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) of every R that stands as an action of its own."""
        return frozenset((a.stage, a.microbatch) for order in self.orders for a in order if a.kind is Kind.R)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) of every backward that runs as I and W."""
        return frozenset((a.stage, a.microbatch) for order in self.orders for a in order if a.kind is Kind.I)

    @cached_property
    def next_backwards(self) -> Mapping[tuple[int, int], int]:
        """By (stage, micro-batch) of a forward: the stage's next backward, where its forward came before this one."""
        found: dict[tuple[int, int], int] = {}
        for order in self.orders:
            forwards = {(a.stage, a.microbatch): i for i, a in enumerate(order) if a.kind is Kind.F}
            coming: dict[int, int] = {}
            for i, action in reversed(list(enumerate(order))):
                stage = action.stage
                if action.kind in (Kind.B, Kind.I):
                    coming[stage] = action.microbatch
                elif action.kind is Kind.F and forwards.get((stage, coming.get(stage, -1)), i) < i:
                    found[stage, action.microbatch] = coming[stage]
        return found

    def next_backward(self, stage: int, microbatch: int) -> int | None:
        """The micro-batch of `next_backwards` whose recompute can run under this one's forward.

        None where one of both backwards is split and the other is not: what surrounds the forward would surround the
        recompute of another kind of forward.
        """
        coming = self.next_backwards.get((stage, microbatch))
        split = self.split_backwards
        return coming if ((stage, coming) in split) == ((stage, microbatch) in split) else None

    def max_deferred(self, rank: int) -> int:
        """Most micro-batches of ``rank`` whose I has run and whose W has not."""
        now = most = 0
        for action in self.orders[rank]:
            now += {Kind.I: 1, Kind.W: -1}.get(action.kind, 0)
            most = max(most, now)
        return most

    def to_text(self) -> str:
        """One line per rank; `parse_orders` reads it back."""
        return "\n".join(f"rank {rank}: {format_order(order)}" for rank, order in enumerate(self.orders))

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change with any action, layout, recompute count or unit table."""
        text = f"{self.rank_of} {self.layers_per_stage} {self.recomputed_layers}\n{self.to_text()}"
        if self.unit_tables:
            text += f"\n{self.unit_tables}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def tables_json(self) -> list[list[dict[str, str]]]:
        """Unit tables, by stage and layer; `parse_tables` reads them back."""
        return [[dict(layer) for layer in stage] for stage in self.unit_tables]

    def to_json(self) -> Mapping[str, list[str]]:
        """Orders as in the command line's contract: rank as string -> actions without communication."""
        return {str(rank): [str(a) for a in self.compute_order(rank)] for rank in range(self.num_ranks)}


def parse_orders(text: str) -> tuple[tuple[Action, ...], ...]:
    """The orders in the text form of `Plan.to_text`.

    Raises:
        ScheduleError: a line holds something that is no action.
    """
    return tuple(tuple(parse_order(line.partition(":")[2])) for line in text.splitlines() if line.strip())


def parse_tables(content: Iterable[Iterable[Mapping[str, str]]]) -> tuple[tuple[UnitDecisions, ...], ...]:
    """The inverse of `Plan.tables_json`."""
    return tuple(
        tuple(tuple((str(unit), str(done)) for unit, done in layer.items()) for layer in stage) for stage in content
    )
