"""Dominance: options that some best table does without are removed before any search."""

from __future__ import annotations

from ext.recompute.problem import Option, StageProblem
from ext.recompute.table import KEEP, UNUSED
from ext.recompute.windows import ON_DEMAND


def consumers(problem: StageProblem) -> list[list[int]]:
    """Units that read each unit's output, by position."""
    found: list[list[int]] = [[] for _ in problem.layer.units]
    for i, unit in enumerate(problem.layer.units):
        for name in unit.inputs:
            found[problem.index[name]].append(i)
    return found


def reduced_options(problem: StageProblem, pooled_layers: int = 1) -> list[list[Option]]:
    """Options per unit without dominated ones; the least exposed time and the least memory stay reachable.

    ``pooled_layers`` is how many layers share the capacity of a stage-wide window.

    Removed are
    - windows that the unit alone overfills, or in which its inputs cannot be there yet;
    - recomputes that hold no less memory than keeping (one micro-batch in flight and a stage-wide window);
    - keeping a unit that the backward does not need, where keeping all its readers takes no more memory: a table that
      keeps it recomputes the readers that it uses, and keeping these instead is no worse;
    - every option of a unit that nobody reads or needs, except leaving it out.
    Units that share storage or a region with others are left alone.
    """
    units, readers = problem.layer.units, consumers(problem)
    bases = {unit.view_of for unit in units}
    tied = [bool(unit.view_of or unit.region or unit.name in bases) for unit in units]
    options = [list(group) for group in problem.options]
    for i in reversed(range(len(units))):
        unit = units[i]
        if unit.keep or tied[i]:
            continue
        active = [j for j in readers[i] if any(option.recomputes for option in options[j])]
        if not unit.needed and not active:
            options[i] = [option for option in options[i] if option.decision == UNUSED]
            continue
        replaceable = not unit.needed and not any(tied[j] for j in active)
        if replaceable and sum(units[j].bytes for j in active) <= unit.bytes:
            options[i] = [option for option in options[i] if option.decision != KEEP]
        options[i] = [option for option in options[i] if _fits(problem, option, pooled_layers)]
        keep = next((option for option in options[i] if option.decision == KEEP), None)
        if keep is not None:
            options[i] = [
                o for o in options[i] if not o.recomputes or o.resident < keep.resident or o.transient < keep.transient
            ]
    _remove_too_early(problem, options)
    return options


def _fits(problem: StageProblem, option: Option, pooled_layers: int) -> bool:
    if not option.recomputes or option.decision == ON_DEMAND:
        return True
    window = problem.window[option.decision]
    capacity = window.capacity * (pooled_layers if window.stage_wide else 1)
    return capacity > 0 and option.time <= capacity


def _remove_too_early(problem: StageProblem, options: list[list[Option]]) -> None:
    """Units stand in forward order, so one pass sees every unit's inputs before itself."""
    for i, unit in enumerate(problem.layer.units):
        inputs = [options[problem.index[name]] for name in unit.inputs]
        options[i] = [
            option
            for option in options[i]
            if not option.recomputes or all(any(value.serves(option) for value in group) for group in inputs)
        ]
