"""`auto` measures once, chooses by size alike on every rank, and says why; linear where two hops are impossible."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ext.comm.topology import RankGroup, rank_groups, topology_of
from ext.core.errors import ConfigError
from ext.core.replay import Memory
from ext.moe import probe
from ext.moe.dispatcher import DISPATCHERS, Auto
from ext.moe.table import Table
from ext.testing.ranks import run_ranks

TABLE = Table((1024, 4096, 16384), (3e-3, 4e-3, 5e-3), (1e-3, 4e-3, 20e-3))


def test_times_between_measured_sizes():
    assert TABLE.times_at(1) == (3e-3, 1e-3)
    assert TABLE.times_at(2048) == pytest.approx((12e-6**0.5, 2e-3))
    assert TABLE.times_at(4096) == pytest.approx((4e-3, 4e-3))
    assert TABLE.times_at(10**9) == (5e-3, 20e-3)
    assert TABLE.prefers_hierarchical(1024)
    assert not TABLE.prefers_hierarchical(4096)
    assert not Table((1,), (1.0,), (0.99,)).prefers_hierarchical(1)  # a tie stays linear
    assert Table((1,), (1.0,), (0.97,)).prefers_hierarchical(1)
    assert not TABLE.prefers_hierarchical(16384)


def test_one_node_is_linear_without_a_measurement(caplog):
    caplog.set_level("INFO", logger="ext.moe")
    group = RankGroup(dist.group.WORLD, topology_of(range(8), ["here"] * 8))
    assert DISPATCHERS.get("auto")().build(group, 8).describe() == "linear (auto: all on one node)"
    assert [r.getMessage() for r in caplog.records] == ["MoE dispatch: 'auto' is linear here: 8 ranks, all on one node"]
    assert caplog.records[0].levelname == "INFO"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _dispatched(dispatcher, rank: int, tokens: int, capacity: int | None) -> str:
    """Which algorithm took a batch of rows of 256 bytes."""
    x = torch.ones(tokens, 64)
    ids = (torch.arange(tokens * 2).view(tokens, 2) + rank) % 4
    rows, _, state = dispatcher.dispatch(x, ids, torch.full((tokens, 2), 0.5), capacity=capacity)
    dispatcher.combine(rows, state)
    return "linear" if state.dispatcher is dispatcher.linear else "hierarchical"


def _on_two_nodes(rank: int, world_size: int, folder: str) -> dict:
    lines = _Lines()
    logger = logging.getLogger("ext.moe")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    (group,) = rank_groups([dist.group.WORLD], 2)
    file = str(Path(folder) / "probe.json")
    config = Auto.Config(probe_seconds=0.3, probe_file=file)
    dispatcher = Auto(config).build(group, 4)
    state = torch.get_rng_state()
    first = [_dispatched(dispatcher, rank, tokens, capacity) for tokens, capacity in ((4, 2), (4, None), (4, 2))]
    assert torch.equal(torch.get_rng_state(), state)
    found = {
        "first": first,
        "tables": dict(probe._tables),
        "lines": list(lines.lines),
        "describe": dispatcher.describe(),
    }

    # A call far beyond what was measured is measured too, one that is near is not.
    measured, measure_one = [], probe.measure_one
    probe.measure_one = lambda *args: measured.append(args[1]) or measure_one(*args)
    for capacity in (16, 20, 8, 2):
        _dispatched(dispatcher, rank, 4, capacity)
    found["measured"] = measured
    found["extended"] = {key[1]: table.sizes for key, table in probe._tables.items()}
    found["tables"] = dict(probe._tables)

    dist.barrier()
    saved = Path(file).read_text()
    probe._tables.clear()
    probe.measure = lambda *_: pytest.fail("measured again")
    again = Auto(config).build(group, 4)
    _dispatched(again, rank, 4, None)
    assert {key[1]: table for key, table in probe._tables.items()}.items() <= {
        key[1]: table for key, table in found["tables"].items()
    }.items()

    # By size, the same on every rank: 4 experts x capacity x 256 bytes, or the most tokens x 2 x 256 bytes.
    for key in found["tables"]:
        probe._tables[key] = TABLE
    found["chosen"] = [
        _dispatched(again, rank, 4, 1),
        _dispatched(again, rank, 4, 16),
        _dispatched(again, rank, 2 + (rank == 3), None),
        _dispatched(again, rank, 32 if rank == 1 else 0, None),
    ]
    memory = Memory()
    with memory.recording():
        kept = _dispatched(again, rank, 4, 1)
    probe._tables.clear()
    with memory.replaying():
        assert _dispatched(again, rank, 4, 1) == kept == "hierarchical"

    dist.barrier()
    broken = []
    for text in (
        "{",
        saved.replace('"sizes"', '"size"'),
        json.dumps({k: _impossible(v) for k, v in json.loads(saved).items()}),
    ):
        if rank == 0:
            Path(file).write_text(text)
        dist.barrier()
        with pytest.raises(ConfigError) as error:
            _dispatched(Auto(config).build(group, 4), rank, 4, None)
        broken.append(str(error.value))
    found["broken"] = broken
    return found


def _impossible(entry: dict) -> dict:
    return {**entry, "linear": [0.0] * len(entry["linear"])}


@pytest.mark.dist
def test_on_two_nodes(tmp_path):
    results = run_ranks(_on_two_nodes, 4, str(tmp_path))
    for found in results:
        assert found["tables"] == results[0]["tables"]
        assert found["first"] == results[0]["first"]
        assert found["chosen"] == ["hierarchical", "linear", "hierarchical", "linear"]
        assert found["broken"] == results[0]["broken"]
    first = results[0]
    assert sorted(key[1].split(", ")[2] for key in first["tables"]) == ["capacity", "dropless"]
    # Up to the size of the first call, 4 experts x capacity 2 or 4 tokens x 2, of 256 bytes; then capacity 16.
    assert sorted(first["extended"].values()) == [(512, 2048), (1024, 2048, 16384)]
    assert first["measured"] == [16]
    assert all("Remove the file to measure again." in text for text in first["broken"])
    # One line per mode, from the first rank alone, with both times.
    lines = [line for line in first["lines"] if line.startswith("MoE dispatch over 2 nodes of 2 ranks: ")]
    assert len(lines) == len({line.split("KiB ")[1].split(":")[0] for line in lines}) == 2
    assert all(" ms, hierarchical " in line and " KiB " in line for line in lines)
    assert first["describe"].startswith("auto (")
    assert all(not found["lines"] for found in results[1:])
