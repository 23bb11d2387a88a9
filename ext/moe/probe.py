"""Measures linear and hierarchical dispatch over message sizes, the same decision on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ext.comm.agree import extremes
from ext.core.errors import ConfigError
from ext.moe.dispatchers.base import Dispatcher
from ext.moe.table import Table, read_table, write_table

LARGEST_BYTES = 64 * 2**20
"""A larger message is taken for one of this size."""
GROWTH = 4
REACH = 2
"""A table serves calls up to so many times its largest size; beyond, that call's size is measured too."""
MAX_ROUNDS = 25
MAX_REPEATS = 10
LONG_ENOUGH_NS = 5e7
"""Shorter calls are timed several in a row, so that it counts little that the ranks do not start together."""


@dataclass(frozen=True)
class Probe:
    """What to measure: both dispatchers on rows of one shape, with a capacity (``k`` None) or with k choices.

    ``variant`` names dispatchers that differ from those of `ext.moe.dispatcher`.
    """

    linear: Dispatcher
    hierarchical: Dispatcher
    hidden: int
    dtype: torch.dtype
    device: torch.device
    k: int | None
    variant: str = ""

    @property
    def key(self) -> str:
        """What a measurement is valid for."""
        mode = "capacity" if self.k is None else f"dropless, k={self.k}"
        variant = f", {self.variant}" if self.variant else ""
        return f"{self.linear.group.topology}, {self.linear.num_experts} experts, {mode}, {self.device.type}{variant}"

    @property
    def step(self) -> int:
        """Bytes of the smallest call: one row for each choice, or one for each expert."""
        return self.hidden * self.dtype.itemsize * (self.linear.num_experts if self.k is None else self.k)

    def rows_for(self, size: int) -> int:
        """How many times `step` cover ``size`` bytes, or the largest size that is measured."""
        return max(1, -(-min(size, LARGEST_BYTES) // self.step))


def measured(probe: Probe, size: int, seconds: float, file: str | None = None) -> Table:
    """The table of ``probe``, kept in this process, measured up to ``size`` bytes. Collective over its group.

    Args:
        probe: what to measure.
        size: of the call to come, the same on every rank.
        seconds: about how long a measurement may take.
        file: JSON read before the first measurement, and written by global rank 0 after every one.

    Raises:
        ConfigError: on all ranks, where the file cannot be read.
    """
    key = (probe.linear.group.topology.ranks, probe.key)
    table = _tables.get(key)
    if table is None and file is not None:
        table = _read(probe, file)
    if table is None:
        extended = measure(probe, size, seconds)
    elif min(size, LARGEST_BYTES) > REACH * table.sizes[-1]:
        extended = table.extended(*measure_one(probe, probe.rows_for(size), seconds / 2))
    else:
        extended = table
    if extended is not table and file is not None and dist.get_rank() == 0:
        write_table(Path(file), probe.key, extended)
    _tables[key] = extended
    return extended


def measure(probe: Probe, size: int, seconds: float) -> Table:
    """Time both at ``size`` for half of ``seconds``, and at smaller sizes. Collective; every rank gets the same table.

    Random numbers of the caller are untouched.
    """
    start = time.perf_counter()
    largest = probe.rows_for(size)
    smaller = [1]
    while smaller[-1] * GROWTH < largest:
        smaller.append(smaller[-1] * GROWTH)
    results = []
    for rows in smaller if largest > 1 else []:
        results.append(measure_one(probe, rows, seconds / 2 / len(smaller)))
        (spent_us,), _ = _agreed(probe, [int((time.perf_counter() - start) * 1e6)])
        if spent_us > seconds / 2 * 1e6:
            break
    results.append(measure_one(probe, largest, seconds / 2))
    sizes, linear, hierarchical = zip(*results, strict=True)
    return Table(sizes, linear, hierarchical)


_Batch = tuple[Tensor, Tensor, Tensor, int | None]


def measure_one(probe: Probe, rows: int, seconds: float) -> tuple[int, float, float]:
    """Bytes of a call of ``rows`` steps and the seconds of both. Collective.

    Seconds are medians over rounds, in turn, of the slowest rank.
    """
    batch = _batch(probe, rows)
    dispatchers = (probe.linear, probe.hierarchical)
    for dispatcher in dispatchers:
        _seconds(probe, dispatcher, batch, 1)  # connections
    first = [_seconds(probe, dispatcher, batch, 1) for dispatcher in dispatchers]
    slowest, _ = _agreed(probe, [int(t * 1e9) for t in first])
    repeats = [max(1, min(MAX_REPEATS, round(LONG_ENOUGH_NS / t))) for t in slowest]
    per_round = sum(n * t for n, t in zip(repeats, slowest, strict=True)) / 1e9
    rounds = [
        [_seconds(probe, dispatcher, batch, n) / n for dispatcher, n in zip(dispatchers, repeats, strict=True)]
        for _ in range(max(1, min(MAX_ROUNDS, int(seconds / per_round))))
    ]
    slowest, _ = _agreed(probe, [int(t * 1e9) for times in rounds for t in times])
    return rows * probe.step, statistics.median(slowest[0::2]) / 1e9, statistics.median(slowest[1::2]) / 1e9


def _batch(probe: Probe, rows: int) -> _Batch:
    """The arguments of a call: random experts, or with a capacity all experts evenly loaded."""
    experts = probe.linear.num_experts
    if probe.k is None:
        k, capacity, num_tokens = 1, rows, rows * experts
        ids = torch.arange(num_tokens).remainder(experts).unsqueeze(1)
    else:
        k, capacity, num_tokens = probe.k, None, rows
        generator = torch.Generator().manual_seed(rows)
        ids = torch.rand(num_tokens, experts, generator=generator).topk(k, dim=1).indices
    x = torch.ones(num_tokens, probe.hidden, dtype=probe.dtype, device=probe.device)
    probs = torch.full((num_tokens, k), 1 / k, device=probe.device)
    return x, ids.to(probe.device), probs, capacity


@torch.no_grad()
def _seconds(probe: Probe, dispatcher: Dispatcher, batch: _Batch, repeats: int) -> float:
    x, ids, probs, capacity = batch
    dist.barrier(probe.linear.group.process_group)
    _synchronize(probe.device)
    start = time.perf_counter()
    for _ in range(repeats):
        rows, _, state = dispatcher.dispatch(x, ids, probs, capacity=capacity)
        dispatcher.combine(rows, state)
    _synchronize(probe.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _agreed(probe: Probe, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
    values = torch.tensor(list(numbers), dtype=torch.int64, device=probe.device)
    return extremes(values, probe.linear.group.process_group)


def _read(probe: Probe, file: str) -> Table | None:
    """What the group's first rank finds, told to the others, so that all of them go on alike."""
    group = probe.linear.group
    found: list[tuple[Table | None, str]] = [(None, "")]
    if dist.get_rank() == group.topology.ranks[0]:
        found = [read_table(Path(file), probe.key)]
    dist.broadcast_object_list(found, src=group.topology.ranks[0], group=group.process_group)
    table, problem = found[0]
    if problem:
        raise ConfigError(f"ext.moe.dispatcher.probe_file: {file}: {problem} Remove the file to measure again.")
    return table


_tables: dict[tuple[tuple[int, ...], str], Table] = {}
