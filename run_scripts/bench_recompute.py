"""Step time and bytes of recompute policies on one rank: no recompute, torch's own checkpointing, HEU and OPT.

A step runs one micro-batch forward and backward through transformer layers with dropout. Every mode gives bitwise the
same gradients, or the benchmark fails. Tables come from a profile of the very layer, for the first stage of a pipeline
with eight micro-batches in flight and no time to wait; budgets are shares of what no recompute holds. Bytes are those
of all tensors that live after the forward, inputs and weights left out. Times are those of the thread on its core, so
that other jobs on the machine disturb them least; with several threads they are those of the clock. Modes take turns,
and a ratio is the median over turns of mode and reference in the same turn.

With ``--pipeline-parallel 2`` such layers make two stages of a real pipeline; see `recompute_bench.pipeline`. That
takes about four minutes on two idle cores. With ``--tensor-parallel 2`` two ranks share the layers over a link, and
recomputation runs under their all-reduces; see `tensor_parallel_bench.run`. That takes about four minutes.

The default run takes under a minute on an idle core.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ext.recompute.heu import solve_heu
from ext.recompute.opt import solve_opt
from ext.recompute.problem import InfeasibleBudget, StageProblem
from ext.recompute.profile import profile_layer
from ext.recompute.report import RecomputeReport, summary
from ext.recompute.table import UnitTable, keep_all
from ext.recompute.unit_engine import MicrobatchUnits
from ext.recompute.unit_run import Surroundings
from ext.runtime.live_bytes import LiveBytes
from ext.testing.unit_layer import UnitLayer
from recompute_bench import pipeline as pipeline_bench
from recompute_bench.stock import STOCK
from tensor_parallel_bench import run as tensor_parallel_bench

PLANNED_IN_FLIGHT = 8
SAVED_SHARE = 0.65
"""Share of the bytes that the headline rows save at least."""

Layers = Sequence[UnitLayer]
Forward = Callable[[Layers, Tensor], Tensor]


def plain(layers: Layers, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Mode:
    """A way to run the layers.

    Attributes:
        name: as it stands in the rows.
        times: seconds of its steps.
        held: bytes after the forward.
        report: of the unit engine, for its own modes.
    """

    def __init__(self, name: str, forward: Forward | None = None, tables: Sequence[UnitTable] = ()) -> None:
        self.name, self._forward, self._tables = name, forward, tables
        self.times: list[float] = []
        self.held = 0
        self.report = RecomputeReport()

    def step(self, layers: Layers, x: Tensor, after_forward: Callable[[], None] | None = None) -> None:
        """One micro-batch forward and backward; gradients are left in the parameters and the input."""
        torch.manual_seed(0)
        output = self._run(layers, x)
        if after_forward is not None:
            after_forward()
        output.square().mean().backward()

    def _run(self, layers: Layers, x: Tensor) -> Tensor:
        if self._forward is not None:
            return self._forward(layers, x)
        microbatch = MicrobatchUnits(Surroundings(report=self.report))
        for layer, table in zip(layers, self._tables, strict=True):
            x = microbatch.call(layer, x, table)
        return x


def main(
    hidden: int = 896,
    heads: int = 14,
    seq: int = 512,
    micro_batch: int = 1,
    num_layers: int = 2,
    repeats: int = 3,
    budgets: str = "0.5,0.42,0.4",
    threads: int = 1,
    pipeline_parallel: int = typer.Option(1, help="2: two pipeline ranks with --num-layers each."),
    saved: str = typer.Option("0.5,0.58,0.65", help="With --pipeline-parallel 2: shares of the bytes to save."),
    micro_batches: int = typer.Option(4, help="With --pipeline-parallel 2: micro-batches of a step."),
    tensor_parallel: int = typer.Option(1, help="2: two ranks share each layer, over a link of several rates."),
    ratios: str = typer.Option("0.3,1,2", help="With --tensor-parallel 2: one all-reduce over a layer's forward."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per line."),
) -> None:
    """Compare recompute policies on one rank.

    ``budgets`` are shares of the bytes that no recompute holds; HEU and OPT each make tables for every one.
    """
    if tensor_parallel != 1:
        tensor_parallel_bench.main(tensor_parallel, ratios, as_json=as_json)
        return
    if pipeline_parallel not in (1, pipeline_bench.NUM_RANKS):
        raise typer.BadParameter(f"--pipeline-parallel: {pipeline_parallel}; allowed: 1 or {pipeline_bench.NUM_RANKS}.")
    if pipeline_parallel != 1:
        shares = tuple(float(share) for share in saved.split(","))
        setting = pipeline_bench.Setting(hidden, heads, seq, micro_batch, num_layers, micro_batches, repeats, shares)
        pipeline_bench.main(setting, as_json=as_json)
        return
    torch.set_num_threads(threads)
    layers = [UnitLayer(hidden, heads, dropout=0.1, byte_masks=True, seed=i) for i in range(num_layers)]
    x = torch.randn(micro_batch, seq, hidden).requires_grad_()
    costs = profile_layer(layers[0], x, 3)
    total = costs.activation_bytes * num_layers * PLANNED_IN_FLIGHT
    modes = [
        Mode("none", plain),
        *(Mode(name, forward) for name, forward in STOCK.items()),
        Mode("units_keep_all", tables=[keep_all([])] * num_layers),
    ]
    problems = {}
    for share in map(float, budgets.split(",")):
        problem = StageProblem(costs, num_layers, PLANNED_IN_FLIGHT, int(total * share))
        try:
            solutions = {"heu": solve_heu(problem), "opt": solve_opt(problem, time_limit=1.0)}
        except InfeasibleBudget as error:
            raise typer.BadParameter(f"{share}: {error}") from error
        if solutions["opt"].tables == solutions["heu"].tables:
            del solutions["opt"]
        for policy, solution in solutions.items():
            modes.append(Mode(f"{policy}_{share:g}", tables=solution.tables))
            problems[modes[-1].name] = problem, solution
    clock = time.process_time if threads == 1 else time.perf_counter
    _measure(modes, layers, x, repeats, clock)
    rows = list(_rows(modes))
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    _show(modes, rows)
    for mode in modes:
        if mode.name in problems:
            print(f"\n{mode.name}: planned/measured per micro-batch")
            print(summary(mode.report.rows(*problems[mode.name])))


def _measure(modes: Sequence[Mode], layers: Layers, x: Tensor, repeats: int, clock: Callable[[], float]) -> None:
    trained = [x, *(p for layer in layers for p in layer.parameters())]
    expected: list[Tensor] = []
    for mode in modes:
        counter = LiveBytes(trained)
        for tensor in trained:
            tensor.grad = None
        with counter.created():
            mode.step(layers, x, lambda mode=mode, counter=counter: setattr(mode, "held", counter.now))
        gradients = [tensor.grad.clone() for tensor in trained if tensor.grad is not None]
        if not expected:
            expected = gradients
        elif not all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)):
            raise SystemExit(f"{mode.name} gives other gradients than {modes[0].name}")
        mode.report = RecomputeReport()
    for turn in range(repeats):
        # Every turn begins with another mode, so that none always follows the same one.
        for mode in (*modes[turn % len(modes) :], *modes[: turn % len(modes)]):
            start = clock()
            mode.step(layers, x)
            mode.times.append(clock() - start)


def _ratio(mode: Mode, reference: Mode) -> float:
    return statistics.median(a / b for a, b in zip(mode.times, reference.times, strict=True))


def _rows(modes: Sequence[Mode]) -> list[dict[str, Any]]:
    command = "run_scripts/bench_recompute.py " + " ".join(sys.argv[1:])
    by_name = {mode.name: mode for mode in modes}
    none = by_name["none"]

    def row(name: str, mode: Mode, reference: Mode, ratio: float) -> dict[str, Any]:
        return {
            "name": name,
            "measured": round(statistics.median(mode.times) * 1e3, 3),
            "reference": round(statistics.median(reference.times) * 1e3, 3),
            "ratio": round(ratio, 4),
            "unit": "ms",
            "command": command.strip(),
            "saved_share": round(1 - mode.held / none.held, 4),
            "held_mib": round(mode.held / 2**20, 2),
        }

    rows = [row(f"recompute_step_{mode.name}", mode, none, _ratio(mode, none)) for mode in modes]
    enough = [m for m in modes if m.name.startswith(("heu_", "opt_")) and 1 - m.held / none.held >= SAVED_SHARE]
    if enough:
        best = min(enough, key=lambda mode: statistics.median(mode.times))
        full_mode = min((by_name["full"], by_name["full_reentrant"]), key=lambda m: statistics.median(m.times))
        rows.append(row("recompute_65_over_none", best, none, _ratio(best, none)))
        rows.append(row("recompute_65_speedup_over_full", best, full_mode, _ratio(full_mode, best)))
    return rows


def _show(modes: Sequence[Mode], rows: Sequence[dict[str, Any]]) -> None:
    table = Table("row", "ms", "reference ms", "ratio", "saved", "MiB held")
    for row in rows:
        table.add_row(
            row["name"].removeprefix("recompute_"),
            f"{row['measured']:.1f}",
            f"{row['reference']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['saved_share']:.1%}",
            f"{row['held_mib']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
