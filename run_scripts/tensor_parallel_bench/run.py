"""Recomputation under all-reduces, and sub-pipelining, of two ranks that share layers over a slow link.

The ranks live in network namespaces that are joined by a link whose rate ``tc tbf`` limits (root needed; elsewhere this
says so and uses loopback). It is set so that one all-reduce takes a given share of the compute of one layer's forward.
A step is three micro-batches with one forward more than backwards in flight. Modes take turns, from a barrier to a
barrier; times are medians, ratios medians over turns of two times in the same turn. Every mode gives bit for bit the
same gradients but the one that cuts micro-batches in parts, whose parts draw their own dropout. Tables come from HEU
and from what was measured: units, the all-reduce, the weight gradients that run under it anyway, and how much slower a
recompute is while the link is busy.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from emulated_network import NoEmulatedNetwork
from emulated_network.shaped import shaped_link
from ext.recompute.report import summary
from ext.recompute.windows import ON_DEMAND
from ext.testing.ranks import run_ranks
from tensor_parallel_bench.measure import measure
from tensor_parallel_bench.setting import Outcome, Setting

FIRST_MBIT = 1000.0
Row = dict[str, Any]


SETTING = Setting(256, 4, 512, 2, 3, 3, (), 0.35, 6)
"""Layers whose attention scores are most of what is kept, and cheap to recompute."""


def main(num_ranks: int, ratios: str, *, as_json: bool) -> None:
    """Run the benchmark."""
    if num_ranks != 2:
        raise typer.BadParameter(f"--tensor-parallel: {num_ranks}; allowed: 1 or 2. The link joins two ranks.")
    try:
        wanted = tuple(float(ratio) for ratio in ratios.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--ratios: {ratios}; give numbers with commas between them.") from error
    if not all(0.01 <= ratio <= 100 for ratio in wanted):
        raise typer.BadParameter(f"--ratios: {ratios}; give numbers from 0.01 to 100.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a link that was made is removed
    run(replace(SETTING, ratios=wanted), as_json=as_json)


def run(setting: Setting, *, as_json: bool, timeout: float = 280.0) -> None:
    """Measure and print."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="link-") as folder, ExitStack() as stack:
        try:
            names = stack.enter_context(shaped_link(FIRST_MBIT))
            setting = replace(setting, namespaces=tuple(names), store=f"{folder}/store")
        except NoEmulatedNetwork as error:
            console.print(f"no shaped link, loopback instead, so the ratio is what it is: {error}")
            setting = replace(setting, ratios=())
        outcomes = run_ranks(measure, 2, setting, timeout=timeout)[0]
    for outcome in outcomes:
        if as_json:
            for row in rows(outcome):
                print(json.dumps(row), flush=True)
        else:
            _show(outcome)


def rows(outcome: Outcome) -> Iterator[Row]:
    """One row per mode against no recompute, and overlapped against full and on demand."""
    times, held = outcome.times, outcome.held
    where = f"all-reduce / layer forward {outcome.ratio:.2f}"
    for name in times:
        saved = 1 - held[name] / held["none"]
        yield _row(f"tensor_parallel_{name}, {where}", times[name], times["none"], saved_share=round(saved, 4))
    yield _row(f"tensor_parallel_overlapped_speedup_over_full, {where}", times["full"], times["overlapped"])
    yield _row(f"tensor_parallel_sub_pipelined_speedup, {where}", times["none"], times["sub_pipelined"])
    planned, measured = _shares(_planned(outcome.windows)), _shares(_measured(outcome.windows))
    for name in planned:
        yield {
            "name": f"tensor_parallel_window_{name}, {where}",
            "measured": round(measured[name], 4),
            "reference": round(planned[name], 4),
            "ratio": round(measured[name] / planned[name], 4) if planned[name] else None,
            "unit": "share of recompute time",
            "command": _command(),
        }


def _measured(windows: Sequence[Row]) -> dict[str, float]:
    return {str(row["window"]): float(row["seconds"]) for row in windows}


def _planned(windows: Sequence[Row]) -> dict[str, float]:
    """Seconds by window; what falls on micro-batches or layers that lack it counts as on demand."""
    exposed = {str(row["window"]): float(row["exposed_planned"]) for row in windows}
    planned = {str(row["window"]): float(row["seconds_planned"]) - exposed[str(row["window"])] for row in windows}
    return planned | {ON_DEMAND: sum(exposed.values())}


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in seconds.items()}


def _row(name: str, ours: Sequence[float], other: Sequence[float], **more: Any) -> Row:
    return {
        "name": name,
        "measured": round(statistics.median(ours) * 1e3, 2),
        "reference": round(statistics.median(other) * 1e3, 2),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, other, strict=True)), 4),
        "unit": "ms",
        "command": _command(),
        **more,
    }


def _command() -> str:
    return " ".join(["run_scripts/bench_recompute.py", *sys.argv[1:]])


def _show(outcome: Outcome) -> None:
    console = Console()
    title = f"all-reduce {outcome.all_reduce * 1e3:.1f} ms, layer forward {outcome.forward * 1e3:.1f} ms"
    table = Table("row", "measured", "reference", "ratio", "saved", title=title, title_justify="left")
    for row in rows(outcome):
        name = row["name"].removeprefix("tensor_parallel_").partition(",")[0]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        saved = f"{row['saved_share']:.0%}" if "saved_share" in row else ""
        table.add_row(name, f"{row['measured']:.4g}", f"{row['reference']:.4g}", ratio, saved)
    console.print(table)
    console.print("overlapped, planned/measured per micro-batch:")
    console.print(summary(outcome.windows))
