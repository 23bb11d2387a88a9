"""Step times of pipeline schedules, measured against simulated, beside stock DeepSpeed's and torch's.

Real ranks, engines, autograd and gloo communication; the layers wait instead of computing (ext/testing/emulated.py), so
that a few cores do for many ranks. All contestants run the same layers in one launch and take turns; a step is timed
from a start that all ranks share to the end of the last rank; figures are medians over rounds, speed-ups medians of
the ratio within a round. Simulated times have no cost but the given ones: what is measured on top is the engine's own.

    bench_pipeline.py                            # all schedules and peers at 4 stages, 8 micro-batches, 40 ms
    bench_pipeline.py --stages 8 --micro-batches 16 --schedule 1f1b --schedule shifted_critical_path
    bench_pipeline.py --no-sleep                 # what the engines themselves cost
    bench_pipeline.py --delay-ms 10              # slow links: network namespaces and a relay between them, as root
    bench_pipeline.py --tracing                  # what the trace costs

The default run ends within a minute on two idle cores. Other work on the machine shows in the times: the load is
reported with them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from emulated_network import NoEmulatedNetwork
from ext.core.errors import ConfigError
from ext.pipeline.schedule import SCHEDULES
from pipeline_bench.race import Outcome, race
from pipeline_bench.rows import Row, row, run, show, times_as_long
from pipeline_bench.setting import DUALPIPEV, OURS, STOCK, TORCH, Contestant, Setting, simulated_seconds

DEFAULT_SCHEDULES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path", "zb_h1")
TORCH_SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")

FULL = Contestant("1f1b, full recompute", OURS, "1f1b", "full")
SCP = Contestant("shifted_critical_path", OURS, "shifted_critical_path")
NONE = Contestant("1f1b", OURS, "1f1b", "none")
STOCK_NONE = Contestant("stock DeepSpeed", STOCK, "1f1b", "none")
STOCK_FULL = Contestant("stock DeepSpeed, activation checkpointing", STOCK, "1f1b", "full")
TRACED = Contestant("shifted_critical_path, traced", OURS, "shifted_critical_path", trace=True)

SPEED_UPS = (
    (SCP, FULL),
    (SCP, STOCK_FULL),
    (NONE, STOCK_NONE),
    (FULL, STOCK_FULL),
)
"""Pairs (a, b) of which "speed-up of a over b" is reported where both ran."""


def main(
    stages: Annotated[int, typer.Option(min=2, help="Pipeline ranks.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 8,
    forward_ms: Annotated[float, typer.Option(min=0, help="Forward of one stage and micro-batch.")] = 40.0,
    input_grad_ms: Annotated[float | None, typer.Option(min=0, help="As --forward-ms where not given.")] = None,
    weight_grad_ms: Annotated[float | None, typer.Option(min=0, help="As --forward-ms where not given.")] = None,
    recompute_ms: Annotated[float | None, typer.Option(min=0, help="As --forward-ms where not given.")] = None,
    layers_per_stage: Annotated[int, typer.Option(min=1, help="Sleeping layers of a stage.")] = 1,
    schedule: Annotated[list[str] | None, typer.Option(help="Only these of our schedules; may be repeated.")] = None,
    peers: Annotated[bool, typer.Option(help="Whether DualPipeV and torch's schedules run too.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 2,
    no_sleep: Annotated[bool, typer.Option("--no-sleep", help="Layers take no time: engines alone.")] = False,
    delay_ms: Annotated[float, typer.Option(min=0, help="Time a message travels; needs root.")] = 0.0,
    tracing: Annotated[bool, typer.Option("--tracing", help="Only: one schedule with and without trace.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the hosts print.")] = False,
) -> None:
    """Measure pipeline schedules on emulated accelerators."""
    sleep = 0.0 if no_sleep else 1e-3

    def seconds(given: float | None) -> float:
        return (forward_ms if given is None else given) * sleep

    times = seconds(None), seconds(input_grad_ms), seconds(weight_grad_ms), seconds(recompute_ms)
    setting = Setting(stages, micro_batches, *times, layers_per_stage, delay_ms * 1e-3)
    contestants = [SCP, TRACED] if tracing else list(_contestants(setting, schedule, peers))
    if no_sleep:
        rounds = max(rounds, 20)
    try:
        outcomes = race(setting, contestants, rounds, is_verbose=verbose)
    except NoEmulatedNetwork as error:
        raise ConfigError(f"--delay-ms: {error} Leave it out, or run as root on Linux.") from error
    rows = list(_rows(setting, contestants, outcomes))
    show(rows, setting, rounds, as_json=as_json)


def _contestants(setting: Setting, names: Sequence[str] | None, peers: bool) -> Iterator[Contestant]:
    """Who runs: ours by name, stock DeepSpeed, and the peers that can run this shape."""
    for name in names or DEFAULT_SCHEDULES:
        cls = SCHEDULES.get(name)
        if setting.num_microbatches < cls.min_microbatches:
            if names:
                raise ConfigError(f"--schedule {name}: needs --micro-batches {cls.min_microbatches} or more.")
            continue
        if name == "1f1b":
            yield from (NONE, FULL)
        else:
            yield Contestant(name, OURS, name)
    yield from (STOCK_NONE, STOCK_FULL)
    if peers:
        yield Contestant("DeepSpeed DualPipeV", DUALPIPEV, "DualPipeV", "none")
        yield from (Contestant(f"torch {name}", TORCH, name, "none") for name in TORCH_SCHEDULES)


def _rows(setting: Setting, contestants: Sequence[Contestant], outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    measured: dict[str, float] = {}
    simulated: dict[str, float] = {}
    for contestant in contestants:
        name, outcome = contestant.name, outcomes[contestant.name]
        if outcome.plan is None:
            yield {**_row(name, None, None, "ms"), "error": outcome.error}
            continue
        measured[name] = statistics.median(outcome.seconds)
        asleep = setting.forward > 0
        reference = simulated_seconds(outcome.plan, contestant, setting) if asleep else None
        if reference is not None:
            simulated[name] = reference
        yield _row(name, measured[name] * 1e3, None if reference is None else reference * 1e3, "ms")
    for a, b in SPEED_UPS:
        if a.name in measured and b.name in measured:
            expected = simulated[b.name] / simulated[a.name] if simulated else 1.0
            yield _row(f"speed-up of {a.name} over {b.name}", times_as_long(outcomes, b.name, a.name), expected, "x")
    if TRACED.name in measured:
        yield _row("time with trace over time without", times_as_long(outcomes, TRACED.name, SCP.name), 1.0, "x")


def _row(name: str, measured: float | None, reference: float | None, unit: str) -> Row:
    return row("bench_pipeline.py", name, measured, reference, unit)


if __name__ == "__main__":
    run(main)
