"""Step times of a real GPT under several schedules at the same memory, taking turns in one launch.

Here the layers compute. Ranks on one machine share its cores, so that a schedule which recomputes more pays for it even
where a device of its own would have been idle; with more ranks than cores that is what is measured. bench_pipeline.py
and bench_memory.py measure the orders themselves. Losses are compared too: they must not depend on the schedule.

    bench_gpt.py                               # 1f1b with stage_aware recomputation, and auto, in 40 MiB on 3 ranks
    bench_gpt.py --ranks 2 --rounds 20 --budget-mib 60
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ext.testing.ranks import preload, run_ranks
from pipeline_bench.rows import Row, print_rows, row, run

SCHEDULES = ("1f1b", "shifted_critical_path", "auto")
VOCABULARY, HEADS = 256, 4


@dataclass(frozen=True)
class Job:
    """What every schedule trains.

    Attributes:
        budget: bytes that each rank may hold.
    """

    num_ranks: int
    num_microbatches: int
    num_layers: int
    hidden: int
    sequence: int
    micro_batch: int
    budget: float


@dataclass(frozen=True)
class Result:
    """What one rank saw of a schedule.

    Attributes:
        seconds: by round, of the slowest rank.
        losses: by step, warm-up included.
        simulated: seconds of a step by the costs that the engine measured before the first.
        held: most bytes that each stage held, measured.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    simulated: float
    held: tuple[float, ...]
    plan: str


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Pipeline ranks.")] = 3,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = 12,
    hidden: Annotated[int, typer.Option(min=4, help="Size of the model, a multiple of 4.")] = 128,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 128,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")] = 4,
    budget_mib: Annotated[float, typer.Option(min=0.1, help="What each rank may hold.")] = 40.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Measure schedules on a real GPT at equal memory."""
    job = Job(ranks, micro_batches, layers, hidden, sequence, micro_batch, budget_mib * 2**20)
    preload("ext.adapters.deepspeed.testing", "gpt.model")
    with TemporaryDirectory(prefix="bench-") as folder:
        results = run_ranks(_on_rank, ranks, job, rounds, env={"EXT_RUN_DIR": folder}, timeout=120 + 30 * rounds)[0]
    title = f"{ranks} ranks, {micro_batches} micro-batches, {layers} layers, {budget_mib:g} MiB each, {rounds} rounds"
    print_rows(_rows(results, job), title, as_json=as_json)


def _rows(results: dict[str, Result], job: Job) -> list[Row]:
    rows = []
    for name, result in results.items():
        measured = statistics.median(result.seconds)
        rows.append({**_row(name, measured * 1e3, result.simulated * 1e3, "ms"), "plan": result.plan})
        rows.append(_row(f"{name}: most held by a rank, of the budget", max(result.held) / job.budget, 1.0, "x"))
        off = max(abs(a - b) for a, b in zip(result.losses, results["1f1b"].losses, strict=True))
        rows.append(_row(f"{name}: largest difference of a loss from 1f1b's", off, 0.0, ""))
    for name, result in results.items():
        if name != "1f1b":
            plain = results["1f1b"]
            faster = statistics.median(a / b for a, b in zip(plain.seconds, result.seconds, strict=True))
            rows.append(_row(f"speed-up of {name} over 1f1b", faster, plain.simulated / result.simulated, "x"))
    return rows


def _row(name: str, measured: float, reference: float, unit: str) -> Row:
    return row("bench_gpt.py", name, measured, reference, unit)


def _on_rank(rank: int, world_size: int, job: Job, rounds: int) -> dict[str, Result]:
    import deepspeed
    import torch
    import torch.distributed as dist

    import ext

    deepspeed.init_distributed("gloo", verbose=False)
    engines = {name: _engine(job, name) for name in SCHEDULES}
    generator = torch.Generator().manual_seed(5)
    shape = (job.num_microbatches, job.micro_batch, job.sequence + 1)
    steps = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(rounds + 2)]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for number, tokens in enumerate(steps):
        names = list(engines)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            batches = iter([(part[:, :-1], part[:, 1:]) for part in tokens])
            dist.barrier()
            start = time.monotonic()
            losses[name].append(engines[name].train_batch(batches).item())
            dist.barrier()
            seconds[name].append(time.monotonic() - start)
    return {
        name: Result(
            tuple(seconds[name][2:]),
            tuple(losses[name]),
            _simulated(engine),
            tuple(stage.measured or 0 for stage in ext.memory_report(engine)),
            f"{engine.plan.schedule}, layers {engine.plan.layers_per_stage}, "
            f"recomputed {engine.plan.recomputed_layers}",
        )
        for name, engine in engines.items()
    }


def _simulated(engine: Any) -> float:
    from ext.pipeline.costs import Costs
    from ext.pipeline.simulate import simulate

    stages = zip(engine.memory.profile.models(lambda stage: True), engine.plan.recomputed_layers, strict=True)
    return simulate(engine.plan, Costs(tuple(model.costs[count] for model, count in stages))).step_time


def _engine(job: Job, schedule: str) -> Any:
    import torch

    import ext
    from gpt import model

    config = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.num_microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "ext": {
            "pipeline": {"schedule": schedule, "partition": "uniform", "tolerance": 0.0},
            "recompute": {"policy": "stage_aware", "memory_budget_gib": job.budget / 2**30},
        },
    }
    sizes = model.GPTConfig(VOCABULARY, job.num_layers, job.hidden, HEADS, job.sequence)
    tokens = torch.zeros(job.micro_batch, job.sequence, dtype=torch.long)
    module = model.build(sizes, job.num_ranks, 7, config, (tokens, tokens))
    return ext.initialize(
        model=module, model_parameters=list(module.parameters()), config=config, sample_batch=(tokens, tokens)
    )[0]


if __name__ == "__main__":
    run(main)
