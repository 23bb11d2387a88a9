"""One MoE layer, forward and backward: converted against stock DeepSpeed, with the same routing and the same bits.

Both layers have the same weights and choose the same experts. They take turns; a ratio is the median over turns of
ours and stock's time in the same turn, of the slowest rank. "dropless" sends rows where stock pads every expert to the
busiest one.

The default run takes about a minute and a half on two idle cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The extension that DeepSpeed loads on CPUs is built once per environment, with this environment's ninja.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))

from ext.testing.ranks import run_ranks

HIDDEN, EXPERTS, TOKENS, TURNS = 256, 8, 1024, 31
CASES: dict[str, dict[str, Any]] = {
    "k = 1, capacity factor 1.25": {"k": 1, "capacity_factor": 1.25},
    "k = 2, capacity factor 1": {"k": 2, "capacity_factor": 1.0},
    "k = 2, dropless": {"k": 2, "drop_tokens": False},
}


def time_layers(rank: int, world_size: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the slowest rank by case: (ours, stock) of every turn."""
    os.dup2(2, 1)  # DeepSpeed prints to standard output, which belongs to our rows

    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return {
        name: _turns(_layer(world_size, **options), _layer(world_size, ours=True, **options))
        for name, options in CASES.items()
    }


def _layer(ep_size: int, *, ours: bool = False, **options: Any) -> nn.Module:
    from deepspeed.moe.layer import MoE

    from ext.adapters.deepspeed import moe

    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
    model = nn.ModuleList(
        [MoE(HIDDEN, expert, EXPERTS, ep_size, top2_2nd_expert_sampling=False, use_rts=False, **options)]
    )
    if ours:
        moe.convert(model)
    for layer in model:
        layer.set_deepspeed_parallelism()  # pyright: ignore[reportCallIssue]
    if ours:
        monitor = SimpleNamespace(enabled=False)
        moe.connect(SimpleNamespace(module=model, has_moe_layers=False, monitor=monitor, optimizer=None, mpu=None))
    return model[0]


def _turns(stock: nn.Module, ours: nn.Module) -> list[tuple[float, float]]:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    outputs = [layer(x)[0] for layer in (ours, stock)]
    if not torch.equal(*outputs):
        torch.testing.assert_close(*outputs)
    times = []
    for turn in range(TURNS):
        pair = [0.0, 0.0]
        for index in ((0, 1), (1, 0))[turn % 2]:
            pair[index] = _seconds((ours, stock)[index], x)
        times.append(pair)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [(one, two) for one, two in slowest.tolist()]


def _seconds(layer: nn.Module, x: torch.Tensor) -> float:
    x = x.clone().requires_grad_()
    dist.barrier()
    begin = time.perf_counter()
    output, l_aux, _ = layer(x)
    (output.square().mean() + l_aux).backward()
    seconds = time.perf_counter() - begin
    layer.zero_grad()
    return seconds


def main(as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False) -> None:
    """Run the benchmark."""
    table = Table("MoE layer, forward and backward", "ours", "stock DeepSpeed", "ours / stock")
    for world_size in (2, 4):
        for case, times in run_ranks(time_layers, world_size, timeout=200)[0].items():
            ours, stock = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            ratio = statistics.median(one / two for one, two in times)
            name = f"{world_size} ranks, {case}"
            if as_json:
                row = {"name": f"MoE layer, {name}", "measured": ours, "reference": stock, "ratio": ratio, "unit": "ms"}
                print(json.dumps({**row, "command": " ".join(["python", *sys.argv])}), flush=True)
            table.add_row(name, f"{ours:.1f} ms", f"{stock:.1f} ms", f"{ratio:.3f}")
    if not as_json:
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
