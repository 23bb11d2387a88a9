"""Solvers of unit tables: how long HEU searches, how good it is, and what OPT adds.

Sixty fixed cases: GPT 1.3B to 20B, all-reduces at 14 to 230 GB/s, every stage of four, budgets of 35 to 70 % of the
activations, with and without flash attention. HEU is compared with its own integer program solved to the end without
any reduction, and with a table that recomputes on demand only. Times are of one core's work for one thread; the wall
clock stands beside them. OPT runs on every fifth case.

``--throughput`` instead simulates whole steps of the models under full, selective, on-demand, HEU and OPT
recomputation; that takes some minutes.

The default run takes under a minute on an idle core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ext.cost.hardware import DEVICES, NVLINK, PCIE, Link
from ext.cost.transformer import MODELS
from ext.recompute.analytic import tensor_parallel_windows, transformer_costs
from ext.recompute.compare import POLICIES, Job, Outcome, compare
from ext.recompute.heu import solve_heu, solve_program
from ext.recompute.opt import solve_opt
from ext.recompute.problem import Solution, StageProblem, layer_cost, violations
from ext.recompute.report import predicted_windows
from ext.recompute.windows import one_f_one_b_waits

PAPER_HEU_MS = 160.0
"""Search time of HEU in Lynx (arXiv:2406.08756), on average."""
STAGES = 4
NUM_MICROBATCHES = 16
MICRO_BATCH = 4
DEVICE = DEVICES["a100-40gb"]

Case = tuple[str, int, int, int, float, bool]
# Model, tensor-parallel ranks, GB/s of their all-reduces, stage, share of the activations, flash attention.
CASES: tuple[Case, ...] = (
    ("gpt-1.3b", 2, 14, 0, 0.35, False),
    ("gpt-1.3b", 2, 25, 0, 0.4, True),
    ("gpt-1.3b", 2, 50, 1, 0.5, False),
    ("gpt-1.3b", 2, 100, 1, 0.6, True),
    ("gpt-1.3b", 2, 150, 2, 0.7, False),
    ("gpt-1.3b", 2, 230, 2, 0.35, True),
    ("gpt-1.3b", 2, 14, 3, 0.4, False),
    ("gpt-1.3b", 2, 25, 3, 0.5, True),
    ("gpt-1.3b", 2, 50, 0, 0.6, False),
    ("gpt-1.3b", 2, 100, 0, 0.7, True),
    ("gpt-1.3b", 2, 150, 1, 0.35, False),
    ("gpt-1.3b", 2, 230, 1, 0.4, True),
    ("gpt-4.7b", 4, 25, 1, 0.5, True),
    ("gpt-4.7b", 4, 50, 1, 0.6, False),
    ("gpt-4.7b", 4, 100, 2, 0.7, True),
    ("gpt-4.7b", 4, 150, 2, 0.35, False),
    ("gpt-4.7b", 4, 230, 3, 0.4, True),
    ("gpt-4.7b", 4, 14, 3, 0.5, False),
    ("gpt-4.7b", 4, 25, 0, 0.6, True),
    ("gpt-4.7b", 4, 50, 0, 0.7, False),
    ("gpt-4.7b", 4, 100, 1, 0.35, True),
    ("gpt-4.7b", 4, 150, 1, 0.4, False),
    ("gpt-4.7b", 4, 230, 2, 0.5, True),
    ("gpt-4.7b", 4, 14, 2, 0.6, False),
    ("gpt-7b", 4, 50, 2, 0.7, False),
    ("gpt-7b", 4, 100, 2, 0.35, True),
    ("gpt-7b", 4, 150, 3, 0.4, False),
    ("gpt-7b", 4, 230, 3, 0.5, True),
    ("gpt-7b", 4, 14, 0, 0.6, False),
    ("gpt-7b", 4, 25, 0, 0.7, True),
    ("gpt-7b", 4, 50, 1, 0.35, False),
    ("gpt-7b", 4, 100, 1, 0.4, True),
    ("gpt-7b", 4, 150, 2, 0.5, False),
    ("gpt-7b", 4, 230, 2, 0.6, True),
    ("gpt-7b", 4, 14, 3, 0.7, False),
    ("gpt-7b", 4, 25, 3, 0.35, True),
    ("gpt-13b", 8, 100, 3, 0.4, True),
    ("gpt-13b", 8, 150, 3, 0.5, False),
    ("gpt-13b", 8, 230, 0, 0.6, True),
    ("gpt-13b", 8, 14, 0, 0.7, False),
    ("gpt-13b", 8, 25, 1, 0.35, True),
    ("gpt-13b", 8, 50, 1, 0.4, False),
    ("gpt-13b", 8, 100, 2, 0.5, True),
    ("gpt-13b", 8, 150, 2, 0.6, False),
    ("gpt-13b", 8, 230, 3, 0.7, True),
    ("gpt-13b", 8, 14, 3, 0.35, False),
    ("gpt-13b", 8, 25, 0, 0.4, True),
    ("gpt-13b", 8, 50, 0, 0.5, False),
    ("gpt-20b", 8, 150, 0, 0.6, False),
    ("gpt-20b", 8, 230, 0, 0.7, True),
    ("gpt-20b", 8, 14, 1, 0.35, False),
    ("gpt-20b", 8, 25, 1, 0.4, True),
    ("gpt-20b", 8, 50, 2, 0.5, False),
    ("gpt-20b", 8, 100, 2, 0.6, True),
    ("gpt-20b", 8, 150, 3, 0.7, False),
    ("gpt-20b", 8, 230, 3, 0.35, True),
    ("gpt-20b", 8, 14, 0, 0.4, False),
    ("gpt-20b", 8, 25, 0, 0.5, True),
    ("gpt-20b", 8, 50, 1, 0.6, False),
    ("gpt-20b", 8, 100, 1, 0.7, True),
)


def problem_of(case: Case) -> StageProblem:
    """The stage of a case."""
    name, ranks, gigabytes, stage, share, flash = case
    shape, link = MODELS[name], Link(bandwidth=gigabytes * 1e9, latency=5e-6)
    kw: dict[str, Any] = {"micro_batch": MICRO_BATCH, "device": DEVICE, "tensor_parallel": ranks, "link": link}
    costs = transformer_costs(shape, flash=flash, **kw)
    windows = (
        *tensor_parallel_windows(shape, **kw),
        *one_f_one_b_waits(stage, STAGES, NUM_MICROBATCHES, costs.forward),
    )
    layers, in_flight = shape.num_layers // STAGES, STAGES - stage
    return StageProblem(costs, layers, in_flight, int(costs.activation_bytes * layers * in_flight * share), windows)


def main(
    throughput: bool = typer.Option(False, help="Simulated step times of whole models instead."),
    repeats: int = typer.Option(3, help="Searches per case, of which the fastest counts."),
    opt_seconds: float = typer.Option(2.0, help="Time limit of OPT per case or stage."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per line."),
) -> None:
    """Measure the solvers on fixed cases, or simulate what their tables are worth."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    console = Console(quiet=as_json)
    rows = list(_throughput_rows(console, opt_seconds) if throughput else _solver_rows(console, repeats, opt_seconds))
    command = " ".join(["run_scripts/bench_solver.py", *sys.argv[1:]])
    table = Table("row", "measured", "reference", "ratio", "unit")
    for row in rows:
        row["command"] = command
        if as_json:
            print(json.dumps(row))
        table.add_row(row["name"], *(f"{row[key]:.4g}" for key in ("measured", "reference", "ratio")), row["unit"])
    console.print(table)


def _row(name: str, measured: float, reference: float, unit: str, **more: Any) -> dict[str, Any]:
    ratio = measured / reference if reference else 0.0 if measured == 0 else float("inf")
    return {"name": name, "measured": measured, "reference": reference, "ratio": ratio, "unit": unit, **more}


def _solver_rows(console: Console, repeats: int, opt_seconds: float) -> Iterator[dict[str, Any]]:
    cpu, wall, excess, over_on_demand, fallbacks = [], [], [], [], 0
    solve_heu(problem_of(CASES[0]))  # imports and first calls
    exact_times = []
    for case in CASES:
        problem = problem_of(case)
        runs = [_timed_heu(problem) for _ in range(repeats)]
        cpu.append(min(run[0] for run in runs) * 1e3)
        wall.append(min(run[1] for run in runs) * 1e3)
        solution = runs[0][2]
        fallbacks += solution.fell_back
        if wrong := violations(problem, solution.tables[0]):
            raise SystemExit(f"{case}: {wrong}")
        start = time.process_time()
        chosen, _, complete = solve_program(problem, problem.options, 60.0)
        exact_times.append((time.process_time() - start) * 1e3)
        assert complete
        assert chosen is not None
        exact = problem.num_layers * layer_cost(chosen)
        noise = 1e-6 * problem.num_layers * problem.layer.forward
        excess.append(max(0.0, solution.exposed - exact - noise) / exact if exact > noise else solution.exposed > noise)
        on_demand = solve_heu(replace(problem, windows=()))
        over_on_demand.append(solution.exposed > on_demand.exposed + noise)
    yield _row("heu_search_median_ms", statistics.median(cpu), PAPER_HEU_MS, "ms")
    yield _row("heu_search_p95_ms", _percentile(cpu, 0.95), PAPER_HEU_MS, "ms")
    yield _row("heu_search_wall_median_ms", statistics.median(wall), PAPER_HEU_MS, "ms")
    yield _row("heu_search_wall_p95_ms", _percentile(wall, 0.95), PAPER_HEU_MS, "ms")
    yield _row("heu_fallback_share", fallbacks / len(CASES), 0.05, "share")
    yield _row("heu_excess_over_exact_max", max(excess), 0.02, "share")
    yield _row("heu_above_on_demand", sum(over_on_demand), 0, "cases")
    yield _row("whole_program_median_ms", statistics.median(exact_times), PAPER_HEU_MS, "ms")
    yield _row("whole_program_p95_ms", _percentile(exact_times, 0.95), PAPER_HEU_MS, "ms")
    yield from _opt_rows(opt_seconds)
    yield from _exposed_rows(console, opt_seconds)


def _timed_heu(problem: StageProblem) -> tuple[float, float, Solution]:
    fresh = replace(problem)  # nothing cached from an earlier search
    wall, cpu = time.perf_counter(), time.process_time()
    solution = solve_heu(fresh)
    return time.process_time() - cpu, time.perf_counter() - wall, solution


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * share // 1).__int__() - 1)]


def _opt_rows(opt_seconds: float) -> Iterator[dict[str, Any]]:
    gaps, seconds, gains = [], [], []
    for case in CASES[::5]:
        problem = problem_of(case)
        heu, opt = solve_heu(problem), solve_opt(problem, time_limit=opt_seconds)
        gaps.append(opt.gap)
        seconds.append(opt.seconds)
        gains.append((heu.exposed - opt.exposed) / (problem.num_layers * problem.layer.forward))
    yield _row("opt_gap_median", statistics.median(gaps), 0.01, "share")
    yield _row("opt_gap_max", max(gaps), 0.18, "share")
    yield _row("opt_search_median_s", statistics.median(seconds), opt_seconds, "s")
    yield _row("opt_search_max_s", max(seconds), opt_seconds, "s")
    yield _row("opt_gain_over_heu_max", max(gains), 0.026, "of stage forward")


def _exposed_rows(console: Console, opt_seconds: float) -> Iterator[dict[str, Any]]:
    """Recomputation left in the critical path of the first stage of each model, over the stage's forward."""
    table = Table("model", "link", "on demand", "HEU", "OPT", "OPT gap", "windows of HEU, ms per micro-batch")
    for name, ranks in (("gpt-1.3b", 2), ("gpt-7b", 4), ("gpt-13b", 8), ("gpt-20b", 8)):
        for link, gigabytes in (("nvlink", 230), ("pcie", 14)):
            problem = problem_of((name, ranks, gigabytes, 0, 0.4, False))
            forward = problem.num_layers * problem.layer.forward
            on_demand, heu = solve_heu(replace(problem, windows=())), solve_heu(problem)
            opt = solve_opt(problem, time_limit=opt_seconds)
            shares = [solution.exposed / forward for solution in (on_demand, heu, opt)]
            used = {window: use.seconds * 1e3 for window, use in predicted_windows(problem, heu).items()}
            table.add_row(
                name,
                link,
                *(f"{share:.1%}" for share in shares),
                f"{opt.gap:.1%}",
                " ".join(f"{window} {time:.1f}" for window, time in sorted(used.items())),
            )
            for policy, share in (("heu", shares[1]), ("opt", shares[2])):
                yield _row(f"exposed_{policy}_{name}_{link}", share, shares[0], "of stage forward")
    console.print(table)


def _throughput_rows(console: Console, opt_seconds: float) -> Iterator[dict[str, Any]]:
    """Step times under every policy at two micro-batches: the smallest that needs recomputation, and twice that."""
    table = Table("model", "link", "attention", "batch", "head", *POLICIES[2:], "HEU/base", "OPT/base", "gap")
    for name, ranks in (("gpt-1.3b", 2), ("gpt-7b", 4), ("gpt-13b", 8), ("gpt-20b", 8)):
        for link_name, link in (("nvlink", NVLINK), ("pcie", PCIE)):
            for flash in (False, True):
                for job, outcomes in _pressed(name, ranks, link, flash, opt_seconds):
                    attention = "flash" if flash else "unfused"
                    cells = [name, link_name, attention, str(job.micro_batch)]
                    label = "_".join([name, link_name, attention, f"b{job.micro_batch}"])
                    for head in (True, False):
                        timed = replace(job, head=head)
                        times = {policy: _step_time(timed, outcome) for policy, outcome in outcomes.items()}
                        baseline = min(times[policy] for policy in ("full", "selective", "on_demand"))
                        speedups = [_ratio(times["full"], times[policy]) for policy in POLICIES[2:]]
                        gains = {policy: _ratio(baseline, times[policy]) for policy in ("heu", "opt")}
                        gap = max((solution.gap for solution in outcomes["opt"].solutions), default=0.0)
                        shown = ["-" if value is None else f"{value:.3f}" for value in (*speedups, *gains.values())]
                        table.add_row(*cells, "yes" if head else "no", *shown, f"{gap:.1%}")
                        for policy, gain in gains.items():
                            over_full = _ratio(times["full"], times[policy])
                            if gain is None or over_full is None:
                                continue
                            where = f"{policy}_{label}_{'head' if head else 'no_head'}"
                            yield _row(f"speedup_over_full_{where}", over_full, 1.0, "x, simulated")
                            yield _row(f"speedup_over_best_baseline_{where}", gain, 1.0, "x, simulated")
    console.print("Simulated throughput over full recomputation (-: does not fit). The base is the best of full,")
    console.print("selective and on demand. Without head all stages take equally long, as after a good partition.")
    Console(width=130, quiet=console.quiet).print(table)


def _step_time(job: Job, outcome: Outcome) -> float:
    return float("inf") if outcome.step_time is None else job.step_time(outcome.exposed)


def _ratio(slower: float, faster: float) -> float | None:
    return None if float("inf") in (slower, faster) else slower / faster


def _pressed(
    name: str, ranks: int, link: Link, flash: bool, opt_seconds: float
) -> Iterator[tuple[Job, dict[str, Outcome]]]:
    """The two smallest micro-batches for which something must be recomputed and full recomputation fits."""
    found = 0
    for micro_batch in (1, 2, 4, 8, 16, 32):
        job = Job(MODELS[name], DEVICE, link, ranks, STAGES, micro_batch, NUM_MICROBATCHES, flash)
        quick = compare(job, ("none", "full"))
        if quick["none"].step_time is None and quick["full"].step_time is not None:
            yield job, compare(job, opt_seconds=opt_seconds)
            found += 1
        if found == 2:
            return


if __name__ == "__main__":
    typer.run(main)
