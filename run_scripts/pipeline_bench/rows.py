"""Results as all benchmarks give them: one JSON object per line, or a table."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ext.core.errors import ExtError
from pipeline_bench.race import Outcome
from pipeline_bench.setting import Setting

Row = dict[str, Any]

_FORMS = {"ms": "{:.1f} ms", "x": "{:.3f}x", "A": "{:.3f} A", "": "{:.3g}"}


def row(script: str, name: str, measured: float | None, reference: float | None, unit: str) -> Row:
    """One line; the reference of a time and of a speed-up is the simulated one."""
    return {
        "name": name,
        "measured": None if measured is None else round(measured, 4),
        "reference": None if reference is None else round(reference, 4),
        "ratio": None if measured is None or not reference else round(measured / reference, 4),
        "unit": unit,
        "command": " ".join([f"run_scripts/{script}", *sys.argv[1:]]),
        "load": os.getloadavg()[0],
    }


def times_as_long(outcomes: Mapping[str, Outcome], a: str, b: str) -> float:
    """How many times as long as b takes a, median of the rounds."""
    pairs = zip(outcomes[a].seconds, outcomes[b].seconds, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def show(rows: Sequence[Row], setting: Setting, num_rounds: int, *, as_json: bool) -> None:
    """Print all rows of a race."""
    title = (
        f"{setting.num_ranks} ranks, {setting.num_microbatches} micro-batches, forward {setting.forward * 1e3:g} ms, "
        f"links {setting.latency * 1e3:g} ms, {num_rounds} rounds"
    )
    print_rows(rows, title, as_json=as_json)


def print_rows(rows: Sequence[Row], title: str, *, as_json: bool) -> None:
    """Print rows, as a table under a title or one JSON object per line."""
    if as_json:
        for entry in rows:
            print(json.dumps(entry))
        return
    title = f"{title}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    table = Table("", "measured", "simulated", "ratio", title=title, title_justify="left")
    for entry in rows:
        if "error" in entry:
            table.add_row(entry["name"], f"failed: {entry['error']}")
            continue
        form = _FORMS[entry["unit"]]
        cells = [form.format(entry[key]) if entry[key] is not None else "-" for key in ("measured", "reference")]
        table.add_row(entry["name"], *cells, "-" if entry["ratio"] is None else f"{entry['ratio']:.3f}")
    Console(width=150).print(table)


def run(main: Callable[..., None]) -> None:
    """Run a benchmark's command line; an error of ours ends it with one line and exit code 3."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    app = typer.Typer(add_completion=False)
    app.command()(main)
    try:
        app(standalone_mode=True)
    except ExtError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)
