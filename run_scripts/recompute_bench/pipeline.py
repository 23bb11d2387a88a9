"""Step time of recompute policies in a real pipeline: two ranks of the DeepSpeed engine under 1F1B, one core each.

Modes are no recompute, torch's own checkpointing inside the layers, and HEU at budgets that make it save at least the
wanted shares of a stage's activations; the budgets are searched with the profile that the run itself takes. Every mode
gives bit for bit the same gradients, or the benchmark fails. Modes take turns, from a barrier to a barrier, and a ratio
is the median over turns of two times in the same turn. Clocks are those of the wall: two ranks need two idle cores.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ext.testing.ranks import run_ranks
from ext.testing.unit_layer import UnitLayer
from recompute_bench.stock import STOCK, StockLayer

NUM_RANKS = 2
ENOUGH = 1.0
"""GiB that no mode fills."""


@dataclass(frozen=True)
class Setting:
    """What is run: ``num_layers`` on each of two stages."""

    hidden: int
    heads: int
    seq: int
    micro_batch: int
    num_layers: int
    num_microbatches: int
    repeats: int
    saved: tuple[float, ...]


@dataclass
class Mode:
    """One engine.

    Attributes:
        name: as it stands in the rows.
        engine: of this rank.
        saved: share of the activations of one micro-batch that forwards do without, over both stages; None where
            torch keeps what no hook can count.
        times: seconds of its steps.
        report: what windows carried, one line per stage.
    """

    name: str
    engine: Any
    saved: float | None = None
    times: list[float] = field(default_factory=list)
    report: list[str] = field(default_factory=list)


def main(setting: Setting, *, as_json: bool, timeout: float = 280.0) -> None:
    """Measure and print."""
    modes = run_ranks(_measure, NUM_RANKS, setting, timeout=timeout)[0]
    command = "run_scripts/bench_recompute.py " + " ".join(sys.argv[1:])
    table = Table("row", "ms", "reference ms", "ratio", "saved")
    for row in _rows(modes):
        row["command"] = command.strip()
        if as_json:
            print(json.dumps(row), flush=True)
        saved = "-" if row["saved_share"] is None else f"{row['saved_share']:.1%}"
        table.add_row(row["name"], f"{row['measured']:.1f}", f"{row['reference']:.1f}", f"{row['ratio']:.3f}", saved)
    if not as_json:
        Console().print(table)
        for mode in modes:
            print("\n".join(f"{mode.name} {line}" for line in mode.report))


def _rows(modes: Sequence[Mode]) -> list[dict[str, Any]]:
    by_name = {mode.name: mode for mode in modes}
    none = by_name["none"]

    def row(name: str, mode: Mode, reference: Mode, ratio: float) -> dict[str, Any]:
        return {
            "name": name,
            "measured": round(statistics.median(mode.times) * 1e3, 3),
            "reference": round(statistics.median(reference.times) * 1e3, 3),
            "ratio": round(ratio, 4),
            "unit": "ms",
            "saved_share": None if mode.saved is None else round(mode.saved, 4),
        }

    rows = [row(f"pp2_step_{mode.name}", mode, none, _ratio(mode, none)) for mode in modes]
    best = modes[-1]
    full = min((by_name["full"], by_name["full_reentrant"]), key=lambda mode: statistics.median(mode.times))
    rows.append(row(f"pp2_{best.name}_over_none", best, none, _ratio(best, none)))
    rows.append(row(f"pp2_{best.name}_speedup_over_full", best, full, _ratio(full, best)))
    return rows


def _ratio(mode: Mode, reference: Mode) -> float:
    return statistics.median(a / b for a, b in zip(mode.times, reference.times, strict=True))


def _measure(rank: int, world_size: int, setting: Setting) -> list[Mode]:
    import deepspeed

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed("gloo")
        modes = _modes(setting)
    expected: dict[str, Tensor] = {}
    for mode in modes:
        gradients = _gradients(mode.engine, setting)
        expected = expected or gradients
        if not all(torch.equal(gradients[name], gradient) for name, gradient in expected.items()):
            raise SystemExit(f"{mode.name} gives other gradients than {modes[0].name}")
    for turn in range(setting.repeats):
        # Every turn begins with another mode, so that none always follows the same one.
        for mode in (*modes[turn % len(modes) :], *modes[: turn % len(modes)]):
            data = _data(setting)
            dist.barrier()
            start = time.perf_counter()
            mode.engine.train_batch(data)
            dist.barrier()
            mode.times.append(time.perf_counter() - start)
    for mode in modes:
        _finish(mode)
    return modes


def _finish(mode: Mode) -> None:
    """Fill in what the engine knows, and let go of it. Collective."""
    import ext
    from ext.recompute.stage_report import lines

    stages = ext.recompute_report(mode.engine)
    if stages:
        whole = sum(costs.activation_bytes for stage in mode.engine.memory.units for costs in stage)
        mode.saved = sum(stage.saved for stage in stages) / whole
        mode.report = list(lines(stages))
    mode.engine = None


def _modes(setting: Setting) -> list[Mode]:
    none = {"policy": "none"}
    modes = [Mode("none", _engine(setting, none), 0.0)]
    modes += [Mode(name, _engine(setting, none, name)) for name in STOCK]
    sample = next(_data(setting))
    budget = {"policy": "lynx_heu", "memory_budget_gib": ENOUGH}
    profiled = _engine(setting, budget, sample_batch=sample)
    for share, budgets in zip(setting.saved, _budgets(profiled, setting.saved), strict=True):
        recompute = {"policy": "lynx_heu", "memory_budget_gib": budgets}
        modes.append(Mode(f"heu_{share:g}", _engine(setting, recompute, sample_batch=sample)))
    return modes


def _engine(setting: Setting, recompute: dict[str, Any], stock: str | None = None, **arguments: Any) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch.nn import functional

    import ext

    layer = (UnitLayer,) if stock is None else (StockLayer, stock)
    specs = [
        LayerSpec(*layer, setting.hidden, setting.heads, dropout=0.1, byte_masks=True, seed=i)
        for i in range(NUM_RANKS * setting.num_layers)
    ]
    module = PipelineModule(specs, num_stages=NUM_RANKS, loss_fn=functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": setting.num_microbatches,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": {"pipeline": {"schedule": "1f1b"}, "recompute": recompute},
    }
    parameters = list(module.parameters())
    return ext.initialize(model=module, model_parameters=parameters, config=config, **arguments)[0]


def _budgets(engine: Any, shares: Sequence[float]) -> list[list[float]]:
    """By share, budgets in GiB for which each stage's forwards do without this share of their activations.

    Of those that make a stage save enough, one with the least recomputation in the critical path is taken.
    """
    found = [[_of_stage(engine, stage, shares) for stage in range(NUM_RANKS)] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    budgets = found[0]
    assert budgets is not None
    return [list(stages) for stages in zip(*budgets, strict=True)]


def _of_stage(engine: Any, stage: int, shares: Sequence[float]) -> list[float]:
    from ext.recompute.heu import solve_heu
    from ext.recompute.pipeline_tables import choose_tables
    from ext.recompute.stage_aware import BudgetError

    profile, units = engine.memory.profile, engine.memory.units
    whole = sum(costs.activation_bytes for costs in units[stage])
    row, layers = engine.memory.rows[stage], engine.plan.layers_per_stage
    tried: list[tuple[float, float, int]] = []
    for percent in range(100):
        budgets = [round(ENOUGH * 2**30)] * NUM_RANKS
        budgets[stage] = round(row.total - percent / 100 * row.activations)
        try:
            found = choose_tables(
                engine.resolution.schedule, profile, units, budgets, solve_heu, layers_per_stage=layers
            )
        except BudgetError:
            break
        tables = found.stages[stage]
        tried.append((tables.saved_bytes / whole, tables.exposed, budgets[stage]))
    most = max(saved for saved, _, _ in tried)
    enough = [[t for t in tried if t[0] >= min(share, most)] for share in shares]
    return [(min(those, key=lambda t: t[1])[2] + 1) / 2**30 for those in enough]


def _data(setting: Setting) -> Any:
    generator = torch.Generator().manual_seed(1)
    shape = setting.micro_batch, setting.seq, setting.hidden
    batches = [
        tuple(torch.randn(shape, generator=generator) for _ in range(2)) for _ in range(setting.num_microbatches)
    ]
    return iter(batches)


def _gradients(engine: Any, setting: Setting) -> dict[str, Tensor]:
    """Of one step, which also warms up."""
    captured: dict[str, Tensor] = {}
    take_step = engine._take_model_step

    def capture_then_step(*args: Any) -> Any:
        for name, parameter in engine.module.named_parameters():
            captured[name.replace("inner.", "")] = parameter.grad.clone()
        return take_step(*args)

    engine._take_model_step = capture_then_step
    torch.manual_seed(3)
    engine.train_batch(_data(setting))
    del engine._take_model_step
    return captured
