"""A stage's times and bytes under its tables, as simulator, memory table and search understand them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ext.pipeline.actions import Action
from ext.pipeline.costs import SplitMemory, StageCosts
from ext.pipeline.memory import heaviest_loads
from ext.pipeline.stage_model import Stage
from ext.recompute.stage_tables import StageTables, seconds, size, working_set
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.units import UnitCosts
from ext.recompute.windows import BEFORE_BACKWARD, IN_BACKWARD, ON_DEMAND, UNDER_FORWARD, WAIT


def table_costs(stage: Stage, tables: StageTables) -> StageCosts:
    """A stage's costs under its tables.

    What runs before the backward is its recompute; what runs on demand beside that is a part of the backward.
    """
    whole = stage.costs(0)
    early, late, everything = tables.recomputed(*BEFORE_BACKWARD), tables.recomputed(*IN_BACKWARD), tables.recomputed()
    exposed = seconds(tables.recomputed(ON_DEMAND))  # what runs under all-reduces takes no time
    costs = replace(
        whole,
        recompute=exposed + seconds(tables.recomputed(WAIT)),
        dropped=size(everything),
        stash=tables.read_again + _temporary(everything),
        working_set=working_set(tables),
    )
    if any(early):
        back = size(early) + working_set(tables, *IN_BACKWARD)
        costs = replace(
            costs,
            recompute=seconds(tables.recomputed(WAIT)),
            input_grad=whole.input_grad + exposed,
            activations=whole.activations - (size(late) - _temporary(late)) + working_set(tables, *IN_BACKWARD),
            dropped=back,
            stash=tables.read_again + _temporary(early),
            # Under another micro-batch's forward the values of all layers come back, without an R.
            working_set=back if any(tables.recomputed(*UNDER_FORWARD)) else costs.working_set,
        )
    return replace(costs, split=_split(stage, tables, costs))


def _split(stage: Stage, tables: StageTables, costs: StageCosts) -> SplitMemory:
    """What I and W hold: W needs the same whether it was kept or brought back, and I frees the rest.

    An I holds at most all that ever comes back, or, as it goes from layer to layer, the larger of what it finds and
    what it leaves, and what one layer brings back meanwhile. What recomputes of a layer have read stays until I is
    done with that layer, while its W's gradients come.
    """
    whole = stage.costs(0)
    split, read = whole.split_memory, _read_by_recomputes(tables)
    everything = whole.activations + tables.read_again + _temporary(tables.recomputed()) + split.growth + read

    def beyond(found: float, layer: float) -> float:
        by_layer = max(found, split.waiting) + layer + stage.most_growth + read
        return max(found, split.waiting, min(everything, by_layer)) - found

    kept = costs.kept
    after_r = kept + costs.dropped
    late = working_set(tables, *IN_BACKWARD) if any(tables.recomputed(*BEFORE_BACKWARD)) else 0
    growth = max(0.0, beyond(after_r - late, late) - late)  # an R's bytes have room for those of one layer
    return SplitMemory(split.waiting, growth, beyond(kept, costs.working_set))


def reserve_bytes(order: Iterable[Action], costs: StageCosts, room: float) -> int:
    """What recomputed values may hold at once: what the plan needs, or more where more is left.

    Args:
        order: of the stage's rank.
        costs: of the stage.
        room: bytes for all that the stage holds for micro-batches.
    """
    loads = heaviest_loads(order)
    kept = max(load.kept * costs.kept + load.waiting * costs.split_memory.waiting for load in loads)
    return round(max(room - kept, max(load.recomputed for load in loads) * costs.dropped))


def _read_by_recomputes(tables: StageTables) -> int:
    """Most bytes of one layer that it keeps and that its recomputes read."""
    most = 0
    for part in tables.parts:
        for table in part.solution.tables:
            recomputed = [unit for unit in part.problem.layer.units if table[unit.name] not in (KEEP, UNUSED)]
            names = {name for unit in recomputed for name in unit.inputs}
            kept = [u.bytes for u in part.problem.layer.units if u.name in names and table[u.name] == KEEP]
            most = max(most, sum(kept) + part.problem.layer.input_bytes if recomputed else 0)
    return most


def _temporary(layers: Sequence[Sequence[UnitCosts]]) -> int:
    """Bytes that recomputes bring back and the backward does not need: no forward would have kept them."""
    return sum(unit.bytes - unit.held for units in layers for unit in units)
