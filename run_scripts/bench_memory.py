"""Step times at equal memory: stock DeepSpeed, Merak's schedules, zb_h1 and `auto` under budgets of activations.

As in bench_pipeline.py, the engines, autograd and communication are real and the layers wait instead of computing; here
every stage has several layers, which also count what the engine really holds. Budgets are in A: all activations of one
rank's share of the model for one micro-batch. Times are compared with the simulator's, counts with its peaks; a counted
peak leaves out the inputs that recomputed layers keep, and so does its reference.

    bench_memory.py                              # 1.25, 2 and 3 A at 4 stages, 16 micro-batches; zb_h1 at 8
    bench_memory.py --budget 2 --rounds 4

The default run takes about four minutes: a step takes four seconds, so that the layers' waits are long against what
each costs by itself. Other work on the machine shows in the times: the load is reported with them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ext.pipeline.build import build_plan
from ext.pipeline.costs import Costs
from ext.pipeline.layout import stage_costs
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.plan_file import write_plan
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import Simulation, simulate
from ext.planner.search.presets import fitting_presets
from ext.planner.search.search import search
from pipeline_bench.budgets import STASH, layer_costs, space
from pipeline_bench.race import Outcome, race
from pipeline_bench.rows import Row, row, run, show, times_as_long
from pipeline_bench.setting import PLANNED, STOCK, Contestant, Setting

MERAK = ("early_recompute", "last_no_recompute", "shifted_critical_path")
STOCK_FULL = "stock DeepSpeed, activation checkpointing"
SPLIT_MICROBATCHES = 8


@dataclass(frozen=True)
class Entry:
    """A contestant with what the simulator says of it, and the budget that it keeps."""

    contestant: Contestant
    plan: Plan
    budget: float | None = None


def main(
    stages: Annotated[int, typer.Option(min=2, help="Pipeline ranks.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=4, help="Micro-batches per step.")] = 16,
    forward_ms: Annotated[float, typer.Option(min=1, help="F, I, W and R of one stage and micro-batch, each.")] = 64.0,
    layers_per_stage: Annotated[int, typer.Option(min=1, help="Layers of a stage, before they move.")] = 8,
    budget: Annotated[list[float] | None, typer.Option(help="In A; may be repeated. [default: 1.25, 2, 3]")] = None,
    search_seconds: Annotated[float, typer.Option(help="Time of each search.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the hosts print.")] = False,
) -> None:
    """Measure schedules that keep a memory budget, on emulated accelerators."""
    time = forward_ms * 1e-3
    setting = Setting(stages, micro_batches, time, time, time, time, layers_per_stage, counts_activations=True)
    short = replace(setting, num_microbatches=SPLIT_MICROBATCHES)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for entries, used, pairs in (
            _budgeted(setting, budget or [1.25, 2.0, 3.0], search_seconds, Path(folder)),
            _split(short, Path(folder)),
        ):
            outcomes = race(used, [entry.contestant for entry in entries], rounds, is_verbose=verbose)
            rows += _rows(used, entries, outcomes, pairs)
    show(rows, setting, rounds, as_json=as_json)


Pairs = list[tuple[str, str]]


def _budgeted(
    setting: Setting, budgets: Sequence[float], search_seconds: float, folder: Path
) -> tuple[list[Entry], Setting, Pairs]:
    """Stock with everything recomputed, and whatever keeps each budget; pairs whose speed-up is of interest."""
    everything = _plan(setting, "1f1b", (setting.layers_per_rank,) * setting.num_ranks)
    entries = [Entry(Contestant(STOCK_FULL, STOCK, "1f1b", "full"), everything)]
    pairs: Pairs = []
    for number, budget in enumerate(budgets):
        within = space(setting, budget)
        presets = fitting_presets(within)
        named = {
            name: build_plan(p.schedule, layers_per_stage=p.layout.layers, recomputed_layers=p.layout.recomputed)
            for name, p in presets.items()
        }
        merak = next((name for name in named if name in MERAK), None)
        wanted = [name for name in ("1f1b", "zb_h1", merak) if name in named]
        labels = {name: f"Merak's best ({name})" if name == merak else name for name in wanted}
        plans = {labels[name]: named[name] for name in wanted}
        plans["auto"] = search(within, seconds=search_seconds, tolerance=0.0).plan
        for label, plan in plans.items():
            path = folder / f"{number}-{len(entries)}.json"
            write_plan(path, plan)
            entries.append(Entry(Contestant(f"{budget:g} A: {label}", PLANNED, str(path)), plan, budget))
        others = [f"{budget:g} A: {labels[name]}" for name in wanted]
        pairs += [(f"{budget:g} A: auto", other) for other in (*others, STOCK_FULL)]
    return entries, setting, pairs


def _split(setting: Setting, folder: Path) -> tuple[list[Entry], Setting, Pairs]:
    """zb_h1 beside 1f1b where nothing is recomputed."""
    entries = []
    for name in ("1f1b", "zb_h1"):
        plan, path = _plan(setting, name, (0,) * setting.num_ranks), folder / f"split-{name}.json"
        write_plan(path, plan)
        label = f"{name}, nothing recomputed, {setting.num_microbatches} micro-batches"
        entries.append(Entry(Contestant(label, PLANNED, str(path)), plan))
    return entries, setting, [(entries[1].contestant.name, entries[0].contestant.name)]


def _plan(setting: Setting, name: str, recomputed: tuple[int, ...]) -> Plan:
    schedule = SCHEDULES.get(name)(shape=PipelineShape(setting.num_ranks, setting.num_microbatches))
    layers = (setting.layers_per_rank,) * setting.num_ranks
    return build_plan(schedule, layers_per_stage=layers, recomputed_layers=recomputed)


def _simulated(plan: Plan, setting: Setting, stash: float) -> Simulation:
    stages = stage_costs(layer_costs(setting, stash), plan.layers_per_stage, plan.recomputed_layers)
    return simulate(plan, Costs(stages))


def _rows(setting: Setting, entries: Sequence[Entry], outcomes: Mapping[str, Outcome], pairs: Pairs) -> Iterator[Row]:
    simulated: dict[str, float] = {}
    for entry in entries:
        name, outcome = entry.contestant.name, outcomes[entry.contestant.name]
        if outcome.plan is None:
            yield {**_row(name, None, None, "ms"), "error": outcome.error}
            continue
        timed = _simulated(entry.plan, setting, STASH)
        simulated[name] = timed.step_time
        yield _row(name, statistics.median(outcome.seconds) * 1e3, timed.step_time * 1e3, "ms")
        counted = {"by_rank": [round(peak, 4) for peak in outcome.peaks], "budget": entry.budget}
        reference = max(_simulated(entry.plan, setting, 0.0).peak_activations)
        yield {**_row(f"{name}: activations", max(outcome.peaks), reference, "A"), **counted}
    for a, b in pairs:
        if a in simulated and b in simulated:
            faster = times_as_long(outcomes, b, a)
            yield _row(f"speed-up of {a} over {b}", faster, simulated[b] / simulated[a], "x")


def _row(name: str, measured: float | None, reference: float | None, unit: str) -> Row:
    return row("bench_memory.py", name, measured, reference, unit)


if __name__ == "__main__":
    run(main)
