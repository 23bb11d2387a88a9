"""Measures linear and hierarchical dispatch over message sizes, the same decision on every rank."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ext.comm.agree import extremes
from ext.core.errors import ConfigError
from ext.moe.dispatchers.base import Dispatcher

logger = logging.getLogger(__name__)

LARGEST_BYTES = 64 * 2**20
GROWTH = 4
ROUNDS = 5
MAX_ROUNDS = 25
SHARE_PER_SIZE = 0.1
"""Of the time that a measurement may take; the rounds of one size go on for so long."""
MARGIN = 0.02
"""Two hops must win by this share; a tie stays linear."""


@dataclass(frozen=True)
class Table:
    """Seconds of one dispatch and combine, by message size.

    Attributes:
        sizes: bytes that a rank sends per all-to-all, its own share included, ascending.
        linear: seconds at each size.
        hierarchical: seconds at each size.
    """

    sizes: tuple[int, ...]
    linear: tuple[float, ...]
    hierarchical: tuple[float, ...]

    def times_at(self, size: int) -> tuple[float, float]:
        """Linear and hierarchical seconds at ``size``; interpolated in logarithms, constant outside."""
        return _at(size, self.sizes, self.linear), _at(size, self.sizes, self.hierarchical)

    def prefers_hierarchical(self, size: int) -> bool:
        """Whether two hops are faster at ``size``, by more than a tie."""
        one, two = self.times_at(size)
        return two < one * (1 - MARGIN)


@dataclass(frozen=True)
class Probe:
    """What to measure: both dispatchers on rows of one shape, with a capacity (``k`` None) or with k choices."""

    linear: Dispatcher
    hierarchical: Dispatcher
    hidden: int
    dtype: torch.dtype
    device: torch.device
    k: int | None

    @property
    def key(self) -> str:
        """What a measurement is valid for."""
        mode = "capacity" if self.k is None else f"dropless, k={self.k}"
        return f"{self.linear.group.topology}, {self.linear.num_experts} experts, {mode}, {self.device.type}"


def measured(probe: Probe, seconds: float, file: str | None = None) -> Table:
    """The table of ``probe``, measured on the first call in this process. Collective over its group.

    Args:
        probe: what to measure.
        seconds: where the measurement stops growing sizes.
        file: JSON read before, and written by global rank 0 after a measurement.

    Raises:
        ConfigError: on all ranks, where the file cannot be read.
    """
    key = (probe.linear.group.topology.ranks, probe.key)
    if key not in _tables:
        table = None if file is None else _read(probe, file)
        if table is None:
            table = measure(probe, seconds)
            if file is not None and dist.get_rank() == 0:
                _write(probe, file, table)
        _tables[key] = table
    return _tables[key]


def measure(probe: Probe, seconds: float) -> Table:
    """Time both at growing sizes until ``seconds`` are spent. Collective; every rank gets the same table.

    Random numbers of the caller are untouched.
    """
    start = time.perf_counter()
    sizes: list[int] = []
    results: list[tuple[float, float]] = []
    tokens = 1
    while True:
        size, batch = _batch(probe, tokens)
        before = time.perf_counter()
        results.append(_time_both(probe, batch, seconds * SHARE_PER_SIZE))
        sizes.append(size)
        now = time.perf_counter()
        (spent_us, last_us), _ = _agreed(probe, [int((now - start) * 1e6), int((now - before) * 1e6)])
        if size * GROWTH > LARGEST_BYTES or spent_us + last_us > seconds * 1e6:
            break
        tokens *= GROWTH
    one, two = zip(*results, strict=True)
    return Table(tuple(sizes), one, two)


_Batch = tuple[Tensor, Tensor, Tensor, int | None]


def _batch(probe: Probe, tokens: int) -> tuple[int, _Batch]:
    """The bytes of a call and its arguments: random experts, evenly loaded."""
    experts = probe.linear.num_experts
    row = probe.hidden * probe.dtype.itemsize
    k, capacity = (1, tokens) if probe.k is None else (probe.k, None)
    num_tokens = tokens * experts if probe.k is None else tokens
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(num_tokens, experts, generator=generator)
    ids = scores.topk(k, dim=1).indices
    if capacity is not None:
        ids = torch.arange(num_tokens).remainder(experts).unsqueeze(1)
    x = torch.ones(num_tokens, probe.hidden, dtype=probe.dtype, device=probe.device)
    probs = torch.full((num_tokens, k), 1 / k, device=probe.device)
    return num_tokens * k * row, (x, ids.to(probe.device), probs, capacity)


def _time_both(probe: Probe, batch: _Batch, seconds: float) -> tuple[float, float]:
    """Medians over rounds, in turn, of the slowest rank's seconds."""
    dispatchers = (probe.linear, probe.hierarchical)
    for dispatcher in dispatchers:
        _seconds(probe, dispatcher, batch, 1)  # connections
    first = [_seconds(probe, dispatcher, batch, 1) for dispatcher in dispatchers]
    slowest, _ = _agreed(probe, [int(t * 1e9) for t in first])
    # Several calls in a row, so that it counts little that the ranks do not start together.
    repeats = [max(2, min(10, round(2e6 / t))) for t in slowest]
    per_round = sum(n * t for n, t in zip(repeats, slowest, strict=True)) / 1e9
    num_rounds = max(ROUNDS, min(MAX_ROUNDS, int(seconds / per_round)))
    rounds = [
        [_seconds(probe, dispatcher, batch, n) / n for dispatcher, n in zip(dispatchers, repeats, strict=True)]
        for _ in range(num_rounds)
    ]
    slowest, _ = _agreed(probe, [int(t * 1e9) for times in rounds for t in times])
    return statistics.median(slowest[0::2]) / 1e9, statistics.median(slowest[1::2]) / 1e9


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


def _at(size: int, sizes: Sequence[int], times: Sequence[float]) -> float:
    if size <= sizes[0]:
        return times[0]
    for (low, high), (before, after) in zip(pairwise(sizes), pairwise(times), strict=True):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(before) + share * math.log(after))
    return times[-1]


def _read(probe: Probe, file: str) -> Table | None:
    """What the group's first rank finds, told to the others, so that all of them go on alike."""
    group = probe.linear.group
    found: list[tuple[Table | None, str]] = [(None, "")]
    if dist.get_rank() == group.topology.ranks[0]:
        found = [_parse(Path(file), probe.key)]
    dist.broadcast_object_list(found, src=group.topology.ranks[0], group=group.process_group)
    table, problem = found[0]
    if problem:
        raise ConfigError(f"ext.moe.dispatcher.probe_file: {file}: {problem} Remove the file to measure again.")
    return table


def _parse(path: Path, key: str) -> tuple[Table | None, str]:
    if not path.exists():
        return None, ""
    try:
        entry = json.loads(path.read_text()).get(key)
        if entry is None:
            return None, ""
        table = Table(*(tuple(entry[name]) for name in ("sizes", "linear", "hierarchical")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"cannot be read: {error!r}."
    lengths = {len(table.sizes), len(table.linear), len(table.hierarchical)}
    numbers = [*table.sizes, *table.linear, *table.hierarchical]
    is_valid = len(lengths) == 1 and 0 not in lengths and all(isinstance(n, (int, float)) and n > 0 for n in numbers)
    if not is_valid or any(a >= b for a, b in pairwise(table.sizes)):
        return None, f"the entry '{key}' does not hold ascending sizes and as many times, all above 0."
    return table, ""


def _write(probe: Probe, file: str, table: Table) -> None:
    path = Path(file)
    try:
        tables = json.loads(path.read_text()) if path.exists() else {}
        tables[probe.key] = asdict(table)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(tables, indent=1) + "\n")
        part.replace(path)
    except OSError as error:  # the measurement stands; only later runs miss it
        logger.warning("ext.moe.dispatcher.probe_file: %s cannot be written: %s", file, error)


_tables: dict[tuple[tuple[int, ...], str], Table] = {}
