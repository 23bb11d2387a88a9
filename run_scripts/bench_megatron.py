"""Step times of this package's schedules in Megatron-core, beside Megatron's own 1F1B on the same layers.

Real ranks, autograd and gloo communication; the layers of a TransformerBlock wait instead of computing
(ext/testing/emulated.py), as in bench_pipeline.py, whose contestants on DeepSpeed these are to be compared with.
`auto` measures the layers in its first step and searches, as in a user's run; under a budget of activations (in A, all
of one rank's share of the model for one micro-batch) its plan is made for the given times and comes from a file.
Needs megatron-core; no checkout of Megatron-LM and no GPU.

    bench_megatron.py                            # 4 stages, 8 micro-batches, 40 ms
    bench_megatron.py --stages 8 --micro-batches 16 --schedule 1f1b --schedule shifted_critical_path
    bench_megatron.py --no-sleep                 # what the schedules themselves cost

The default run ends within a minute on two idle cores. Other work on the machine shows in the times: the load is
reported with them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ext.core.errors import ConfigError
from ext.pipeline.plan_file import write_plan
from ext.pipeline.schedule import SCHEDULES
from ext.planner.search.search import search
from pipeline_bench.budgets import space
from pipeline_bench.race import MEGATRON, Outcome, race
from pipeline_bench.rows import Row, row, run, show, times_as_long
from pipeline_bench.setting import OURS, PLANNED, STOCK, Contestant, Setting, simulated_seconds

DEFAULT_SCHEDULES = ("1f1b", "shifted_critical_path", "zb_h1", "auto")

STOCK_NONE = Contestant("Megatron's 1F1B", STOCK, "1f1b", "none")
STOCK_FULL = Contestant("Megatron's 1F1B, full recompute", STOCK, "1f1b", "full")
NONE = Contestant("1f1b", OURS, "1f1b", "none")
FULL = Contestant("1f1b, full recompute", OURS, "1f1b", "full")
SCP = Contestant("shifted_critical_path", OURS, "shifted_critical_path")
ZB = Contestant("zb_h1", OURS, "zb_h1")
AUTO = Contestant("auto, nothing recomputed", OURS, "auto", "none")
AUTO_FULL = Contestant("auto, everything recomputed", OURS, "auto", "full")

SPEED_UPS = (
    (NONE, STOCK_NONE),
    (FULL, STOCK_FULL),
    (SCP, STOCK_FULL),
    (AUTO_FULL, STOCK_FULL),
    (ZB, STOCK_NONE),
    (AUTO, STOCK_NONE),
)
"""Pairs (a, b) of which "speed-up of a over b" is reported where both ran."""


def main(
    stages: Annotated[int, typer.Option(min=2, help="Pipeline ranks.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 8,
    forward_ms: Annotated[float, typer.Option(min=1, help="F, I, W and R of one stage and micro-batch, each.")] = 40.0,
    layers_per_stage: Annotated[int, typer.Option(min=1, help="Layers of a stage.")] = 2,
    schedule: Annotated[list[str] | None, typer.Option(help="Only these of our schedules; may be repeated.")] = None,
    budget: Annotated[float, typer.Option(help="In A, for one more `auto`; 0 for none.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 2,
    no_sleep: Annotated[bool, typer.Option("--no-sleep", help="Layers take no time: schedules alone.")] = False,
    delay_ms: Annotated[float, typer.Option(min=0, help="Time a message travels; needs root.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the host prints.")] = False,
) -> None:
    """Measure pipeline schedules in Megatron-core on emulated accelerators."""
    time = 0.0 if no_sleep else forward_ms * 1e-3
    setting = Setting(stages, micro_batches, time, time, time, time, layers_per_stage, delay_ms * 1e-3)
    rounds = max(rounds, 20) if no_sleep else rounds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        contestants = list(_contestants(setting, schedule or DEFAULT_SCHEDULES))
        if budget and time and (schedule is None or "auto" in schedule):
            contestants.append(_within(setting, budget, Path(folder)))
        outcomes = race(setting, contestants, rounds, host=MEGATRON, is_verbose=verbose)
        rows = list(_rows(setting, contestants, outcomes))
    show(rows, setting, rounds, as_json=as_json)


def _contestants(setting: Setting, names: Sequence[str]) -> Iterator[Contestant]:
    yield from (STOCK_NONE, STOCK_FULL)
    for name in names:
        if setting.num_microbatches < SCHEDULES.get(name).min_microbatches:
            raise ConfigError(
                f"--schedule {name}: needs --micro-batches {SCHEDULES.get(name).min_microbatches} or more."
            )
        known = {"1f1b": (NONE, FULL), "auto": (AUTO, AUTO_FULL) if setting.forward else ()}
        yield from known.get(name, (Contestant(name, OURS, name),))


def _within(setting: Setting, budget: float, folder: Path) -> Contestant:
    """What the search makes of a budget, with the layers where they are."""
    chosen = search(space(setting, budget, moves_layers=False), seconds=2.0, tolerance=0.0)
    path = folder / "plan.json"
    write_plan(path, chosen.plan)
    return Contestant(f"auto within {budget:g} A", PLANNED, str(path))


def _rows(setting: Setting, contestants: Sequence[Contestant], outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    measured: dict[str, float] = {}
    simulated: dict[str, float] = {}
    for contestant in contestants:
        name, outcome = contestant.name, outcomes[contestant.name]
        if outcome.plan is None:
            yield {**_row(name, None, None, "ms"), "error": outcome.error}
            continue
        measured[name] = statistics.median(outcome.seconds)
        if setting.forward:
            simulated[name] = simulated_seconds(outcome.plan, contestant, setting)
        yield _row(name, measured[name] * 1e3, simulated[name] * 1e3 if simulated else None, "ms")
    pairs = [(a.name, b.name) for a, b in SPEED_UPS]
    pairs += [(c.name, STOCK_FULL.name) for c in contestants if c.kind == PLANNED]
    for a, b in pairs:
        if a in measured and b in measured:
            expected = simulated[b] / simulated[a] if simulated else 1.0
            yield _row(f"speed-up of {a} over {b}", times_as_long(outcomes, b, a), expected, "x")


def _row(name: str, measured: float | None, reference: float | None, unit: str) -> Row:
    return row("bench_megatron.py", name, measured, reference, unit)


if __name__ == "__main__":
    run(main)
