"""Two hops give what one hop gives, bit for bit: shapes of nodes, both orders, dtypes, gradients, sub-groups."""

import pytest
import torch
import torch.distributed as dist

from ext.comm.all_to_all import Exchange, HopOrder, LinearExchange, TwoLevelExchange, segment_transpose
from ext.comm.topology import rank_groups
from ext.testing.ranks import run_ranks

# A group's global ranks and the world's ranks per node, by (nodes, ranks per node) of the group: 2x2 on every
# second rank, 2x3 around holes.
SHAPES = {
    (2, 4): (range(8), 4),
    (4, 2): (range(8), 2),
    (2, 2): ([1, 3, 5, 7], 4),
    (2, 3): ([0, 1, 2, 4, 5, 6], 4),
}
CASES = ["random", "some ranks send nothing", "all to one rank", "nothing"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def test_segment_transpose_moves_whole_segments():
    lengths = torch.tensor([[2, 0, 1], [1, 3, 0]])
    rows = ["00", "00", "02", "10", "11", "11", "11"]
    order = segment_transpose(lengths, 7)
    assert [rows[i] for i in order] == ["00", "00", "10", "11", "11", "11", "02"]
    assert segment_transpose(torch.zeros(2, 3, dtype=torch.int64), 0).tolist() == []


def _counts(case: str, rank: int, world_size: int, generator: torch.Generator) -> torch.Tensor:
    counts = torch.randint(0, 4, (world_size, 3), generator=generator)
    if case == "some ranks send nothing" and rank % 2:
        counts.zero_()
    elif case == "all to one rank":
        counts[torch.arange(world_size) != world_size - 1] = 0
    elif case == "nothing":
        counts.zero_()
    return counts


def _rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


def _uneven(exchange: Exchange, counts: torch.Tensor, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Two calls in flight, answered in reverse order, then both backwards; rows, answers and gradients."""
    generator = torch.Generator().manual_seed(seed)
    plans = [exchange.plan(counts), exchange.plan(counts.flip(1) * 2)]
    sent = [_rows((plan.num_sent, 5), dtype, generator) for plan in plans]
    received = [plan.send(rows) for plan, rows in zip(plans, sent, strict=True)]
    assert [len(rows) for rows in received] == [plan.num_received for plan in plans]
    answers = [plan.send_back(rows * 2) for plan, rows in zip(reversed(plans), reversed(received), strict=True)]
    results = [*received, *answers, *(plan.counts for plan in plans)]
    if dtype.is_floating_point:
        weights = [_rows(tuple(a.shape), dtype, generator).detach() for a in answers]
        sum((a * w).float().sum() for a, w in zip(answers, weights, strict=True)).backward()
        for rows, weight in zip(reversed(sent), weights, strict=True):
            torch.testing.assert_close(rows.grad, 2 * weight, rtol=0, atol=0)
            results.append(rows.grad)
    return [r.detach() for r in results]


def _even(exchange: Exchange, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slices = _rows((size, 2, 3), dtype, generator)
    received = exchange.even(slices.transpose(1, 2))
    if not dtype.is_floating_point:
        return [received]
    (received * received).float().sum().backward()
    return [received.detach(), slices.grad]


def _compare(rank: int, world_size: int) -> int:
    compared = 0
    for (nodes, local), (ranks, ranks_per_node) in SHAPES.items():
        process_group = dist.new_group(list(ranks))
        (group,) = rank_groups([process_group] if rank in ranks else [], ranks_per_node) or [None]
        if group is None:
            continue
        assert group.topology.num_nodes == nodes
        size, index = nodes * local, list(ranks).index(rank)
        linear = LinearExchange(group.process_group)
        two_hops = [TwoLevelExchange(group.nodes, order) for order in HopOrder]
        for dtype in DTYPES:
            if dtype in DTYPES[2:] and size == 8:
                continue
            for case in CASES if dtype == torch.float32 else CASES[1:2]:
                counts = _counts(case, index, size, torch.Generator().manual_seed(rank))
                expected = _uneven(linear, counts, dtype, rank)
                for exchange in two_hops:
                    for a, b in zip(expected, _uneven(exchange, counts, dtype, rank), strict=True):
                        assert torch.equal(a, b), (nodes, local, exchange.order, dtype, case)
                    compared += 1
            expected = _even(linear, size, dtype, rank)
            for exchange in two_hops:
                for a, b in zip(expected, _even(exchange, size, dtype, rank), strict=True):
                    assert torch.equal(a, b), (nodes, local, exchange.order, dtype)
        counts = torch.arange(size).view(size, 1) + index  # rows that name source and destination
        for exchange in (linear, *two_hops):
            plan = exchange.plan(counts)
            rows = torch.repeat_interleave(torch.arange(size) + 1000 * index, counts[:, 0])
            expected = torch.repeat_interleave(torch.arange(size) * 1000 + index, torch.arange(size) + index)
            assert torch.equal(plan.send(rows), expected)
            assert torch.equal(plan.counts[:, 0], torch.arange(size) + index)
            slices = torch.arange(size) + 1000 * index
            assert torch.equal(exchange.even(slices), torch.arange(size) * 1000 + index)
            with pytest.raises(ValueError, match="rows given, the plan has"):
                plan.send(rows[1:])
    return compared


@pytest.mark.dist
def test_two_level_is_bit_equal_to_linear_and_linear_is_right():
    assert sum(run_ranks(_compare, 8)) == ((8 + 8) * (4 + 1) + (4 + 6) * (4 + 3)) * 2
