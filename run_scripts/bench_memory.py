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

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ext.core.errors import ExtError
from ext.pipeline.build import build_plan
from ext.pipeline.costs import Costs
from ext.pipeline.layout import LayerCosts, stage_costs
from ext.pipeline.plan import PipelineShape, Plan
from ext.pipeline.plan_file import write_plan
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.simulate import Simulation, simulate
from ext.planner.search.presets import fitting_presets
from ext.planner.search.search import search
from ext.planner.search.space import Space, any_layers
from pipeline_bench.race import Outcome, race
from pipeline_bench.setting import PLANNED, STOCK, Contestant, Setting

STASH = 0.06
"""What a recomputed layer keeps, as a share of its activations."""

MERAK = ("early_recompute", "last_no_recompute", "shifted_critical_path")
STOCK_FULL = "stock DeepSpeed, activation checkpointing"
SPLIT_MICROBATCHES = 8

Row = dict[str, Any]


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
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        _show(rows, setting, rounds)


Pairs = list[tuple[str, str]]


def _budgeted(
    setting: Setting, budgets: Sequence[float], search_seconds: float, folder: Path
) -> tuple[list[Entry], Setting, Pairs]:
    """Stock with everything recomputed, and whatever keeps each budget; pairs whose speed-up is of interest."""
    everything = _plan(setting, "1f1b", (setting.layers_per_rank,) * setting.num_ranks)
    entries = [Entry(Contestant(STOCK_FULL, STOCK, "1f1b", "full"), everything)]
    pairs: Pairs = []
    for number, budget in enumerate(budgets):
        space = _space(setting, budget)
        presets = fitting_presets(space)
        named = {
            name: build_plan(p.schedule, layers_per_stage=p.layout.layers, recomputed_layers=p.layout.recomputed)
            for name, p in presets.items()
        }
        merak = next((name for name in named if name in MERAK), None)
        wanted = [name for name in ("1f1b", "zb_h1", merak) if name in named]
        labels = {name: f"Merak's best ({name})" if name == merak else name for name in wanted}
        plans = {labels[name]: named[name] for name in wanted}
        plans["auto"] = search(space, seconds=search_seconds, tolerance=0.0).plan
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


def _layer(setting: Setting, stash: float) -> LayerCosts:
    share = 1 / setting.layers_per_rank
    return LayerCosts(
        forward=setting.forward * share,
        input_grad=setting.input_grad * share,
        weight_grad=setting.weight_grad * share,
        recompute=setting.recompute * share,
        activations=share,
        stash=stash * share,
    )


def _space(setting: Setting, budget: float) -> Space:
    layers = (setting.layers_per_rank,) * setting.num_ranks
    models = any_layers(_layer(setting, STASH))
    return Space(models, layers, setting.num_microbatches, (budget,) * setting.num_ranks)


def _simulated(plan: Plan, setting: Setting, stash: float) -> Simulation:
    stages = stage_costs(_layer(setting, stash), plan.layers_per_stage, plan.recomputed_layers)
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
            rounds = zip(outcomes[b].seconds, outcomes[a].seconds, strict=True)
            faster = statistics.median(theirs / ours for theirs, ours in rounds)
            yield _row(f"speed-up of {a} over {b}", faster, simulated[b] / simulated[a], "x")


def _row(name: str, measured: float | None, reference: float | None, unit: str) -> Row:
    """A line as all benchmarks print it; the reference is the simulated figure."""
    return {
        "name": name,
        "measured": None if measured is None else round(measured, 4),
        "reference": None if reference is None else round(reference, 4),
        "ratio": None if measured is None or not reference else round(measured / reference, 4),
        "unit": unit,
        "command": " ".join(["run_scripts/bench_memory.py", *sys.argv[1:]]),
        "load": os.getloadavg()[0],
    }


def _show(rows: Sequence[Row], setting: Setting, num_rounds: int) -> None:
    title = (
        f"{setting.num_ranks} ranks, {setting.num_microbatches} micro-batches, forward {setting.forward * 1e3:g} ms, "
        f"{num_rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    table = Table("", "measured", "simulated", "ratio", title=title, title_justify="left")
    forms = {"ms": "{:.1f} ms", "x": "{:.3f}x", "A": "{:.3f} A"}
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], f"failed: {row['error']}")
            continue
        cells = [forms[row["unit"]].format(row[key]) for key in ("measured", "reference")]
        table.add_row(row["name"], *cells, "-" if row["ratio"] is None else f"{row['ratio']:.3f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    app = typer.Typer(add_completion=False)
    app.command()(main)
    try:
        app(standalone_mode=True)
    except ExtError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)
