"""MoE dispatch: linear against hierarchical against `auto` over message sizes, and bytes sent between nodes.

Times are of one dispatch and combine with a capacity and idle experts, 4 nodes of 4 ranks over gloo. The nodes are
network namespaces behind a relay that takes a fixed time for every packet (root needed), then the same ranks on the
plain network of this machine. A time is taken from a start that all ranks share to the end of the slowest rank, on the
plain network over several calls in a row; algorithms take turns; times are medians, ratios medians over turns of two
times in the same turn. Bytes between nodes are counted, not timed: rows of 1024 bf16 values, and with one copy per node
the experts and weights that travel beside each.

The default run takes about three minutes on two idle cores.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from emulated_network import DEVICE, emulated_network, enter
from ext.comm.topology import rank_groups
from ext.moe.dispatcher import DISPATCHERS
from ext.moe.dispatchers.base import Dispatcher
from ext.testing.ranks import run_ranks

NODES, RANKS_PER_NODE = 4, 4
HIDDEN = 64
CAPACITIES = (1, 4, 16, 64, 256)
ROW_BYTES = 1024 * 2
BYTES_PER_CHOICE = 4 + 4


@dataclass(frozen=True)
class Network:
    """Where the ranks of a run live.

    Attributes:
        name: for people.
        namespaces: one per node; empty for the machine's own network.
        store: file by which the ranks find each other there.
        rounds: how often each algorithm is timed at each size.
        calls: how many calls in a row make one time.
        start_delay_s: until a start that all ranks have heard of.
    """

    name: str
    namespaces: tuple[str, ...]
    store: str
    rounds: int
    calls: int
    start_delay_s: float


Row = dict[str, Any]


def time_algorithms(rank: int, world_size: int, network: Network) -> list[Row]:
    """On every rank: by size, the seconds of every turn by algorithm."""
    if network.namespaces:
        dist.barrier()  # all are connected before the first one leaves
        time.sleep(0.5)
        dist.destroy_process_group()
        enter(network.namespaces[rank // RANKS_PER_NODE])
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group("gloo", init_method=f"file://{network.store}", rank=rank, world_size=world_size)
    (group,) = rank_groups([dist.group.WORLD], RANKS_PER_NODE)
    factories = {name: DISPATCHERS.get(name)() for name in ("linear", "hierarchical", "auto")}
    dispatchers = {name: factory.build(group, world_size) for name, factory in factories.items()}
    orders = list(itertools.permutations(dispatchers))
    rows = []
    for capacity in CAPACITIES:
        for dispatcher in [*dispatchers.values()] * 3:
            _call(dispatcher, capacity)  # connections, and the measurement of auto
        ends: dict[str, list[float]] = {name: [] for name in dispatchers}
        for turn in range(network.rounds):
            for name in orders[turn % len(orders)]:
                ends[name].append(_seconds(dispatchers[name], capacity, network))
        times = torch.tensor([ends[name] for name in dispatchers], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        rows.append({"bytes": capacity * HIDDEN * 4, **dict(zip(dispatchers, times.tolist(), strict=True))})
    return rows


def _call(dispatcher: Dispatcher, capacity: int) -> None:
    tokens = capacity * dispatcher.num_experts
    x = torch.ones(tokens, HIDDEN)
    ids = torch.arange(tokens).remainder(dispatcher.num_experts).unsqueeze(1)
    rows, _, state = dispatcher.dispatch(x, ids, torch.ones(tokens, 1), capacity=capacity)
    dispatcher.combine(rows, state)


@torch.no_grad()
def _seconds(dispatcher: Dispatcher, capacity: int, network: Network) -> float:
    """From a start that all ranks share; the clock of `time.monotonic` is one for all namespaces."""
    start = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX)
    begin = start.item() + network.start_delay_s
    time.sleep(max(0.0, begin - time.monotonic()))
    for _ in range(network.calls):
        _call(dispatcher, capacity)
    return (time.monotonic() - begin) / network.calls


def count_bytes(rank: int, world_size: int, ranks_per_node: int, k: int, zipf: float) -> tuple[int, int]:
    """Bytes sent to other nodes there and back with one copy per node, and without; for two experts per rank."""
    (group,) = rank_groups([dist.group.WORLD], ranks_per_node)
    num_experts = 2 * world_size
    dispatcher = DISPATCHERS.get("hierarchical")().build(group, num_experts)
    generator = torch.Generator().manual_seed(rank)
    popularity = torch.arange(1, num_experts + 1).float().pow(-zipf)
    ids = torch.multinomial(popularity.expand(2048, -1), k, generator=generator)
    _, _, state = dispatcher.dispatch(torch.ones(2048, 8), ids, torch.full(ids.shape, 1 / k))
    naive = int((ids // (2 * ranks_per_node) != rank // ranks_per_node).sum())
    both_ways = 2 * ROW_BYTES
    return state.inner.rows_between_nodes * (both_ways + BYTES_PER_CHOICE * k), naive * both_ways


def timings(network: Network) -> Iterator[Row]:
    """Hierarchical over linear, and `auto` over the better, at every size."""
    measured = run_ranks(time_algorithms, NODES * RANKS_PER_NODE, network, timeout=400)[0]
    for row in measured:
        where = f"{network.name}, {row['bytes']} bytes per peer"
        best = min("linear", "hierarchical", key=lambda name, row=row: statistics.median(row[name]))
        yield _compared(f"hierarchical dispatch, {where}", row["hierarchical"], row["linear"], "linear")
        yield _compared(f"auto dispatch, {where}", row["auto"], row[best], f"the better of both, {best}")


def bytes_between_nodes() -> Iterator[Row]:
    """One copy of a token per node against one per expert."""
    for ranks_per_node, k, zipf in ((2, 4, 0.0), (4, 4, 0.0), (4, 8, 0.0), (4, 4, 1.0)):
        counted = run_ranks(count_bytes, 2 * ranks_per_node, ranks_per_node, k, zipf)
        sent, naive = (sum(column) / 2**20 for column in zip(*counted, strict=True))
        name = f"bytes between 2 nodes of {ranks_per_node}, k = {k}, zipf {zipf:g}"
        yield _row(name, sent, naive, "MiB", "one copy per expert")


def _compared(name: str, ours: list[float], other: list[float], against: str) -> Row:
    ratio = statistics.median(a / b for a, b in zip(ours, other, strict=True))
    return _row(name, statistics.median(ours) * 1e3, statistics.median(other) * 1e3, "ms", against, ratio)


def _row(name: str, measured: float, reference: float, unit: str, against: str, ratio: float | None = None) -> Row:
    return {
        "name": name,
        "measured": measured,
        "reference": reference,
        "ratio": measured / reference if ratio is None else ratio,
        "unit": unit,
        "against": against,
        "command": " ".join(["python", *sys.argv]),
    }


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    packet_us: Annotated[float, typer.Option(help="Time the emulated network takes per packet.")] = 200.0,
    emulated: Annotated[bool, typer.Option(help="Also measure behind the relay; needs root.")] = True,
    plain: Annotated[bool, typer.Option(help="Also measure on this machine's own network.")] = True,
) -> None:
    """Run the benchmark."""
    table = Table("what", "measured", "reference", "ratio")
    with tempfile.TemporaryDirectory() as folder:
        for row in _all(Path(folder), packet_us, emulated, plain):
            if as_json:
                print(json.dumps(row), flush=True)
            else:
                numbers = [f"{row[key]:.4g} {row['unit']}" for key in ("measured", "reference")]
                table.add_row(row["name"], numbers[0], f"{numbers[1]} ({row['against']})", f"{row['ratio']:.3f}")
    if not as_json:
        Console().print(table)


def _all(folder: Path, packet_us: float, emulated: bool, plain: bool) -> Iterator[Row]:
    yield from bytes_between_nodes()
    size = f"{NODES}x{RANKS_PER_NODE} ranks"
    for is_wanted, is_emulated in ((emulated, True), (plain, False)):
        if not is_wanted:
            continue
        name = f"{size}, {packet_us:g} us per packet" if is_emulated else f"{size}, plain"
        made = emulated_network(NODES, packet_us=packet_us) if is_emulated else nullcontext([])
        with made as namespaces:
            store = str(folder / ("emulated" if is_emulated else "plain"))
            if is_emulated:
                yield from timings(Network(name, tuple(namespaces), store, rounds=18, calls=1, start_delay_s=0.1))
            else:
                yield from timings(Network(name, (), store, rounds=24, calls=8, start_delay_s=0.03))


if __name__ == "__main__":
    typer.run(main)
