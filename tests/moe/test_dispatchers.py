"""Every dispatcher gives the reference's numbers, and hierarchical gives linear's bits, on real ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist

from ext.comm.topology import RankGroup, rank_groups, topology_of
from ext.core.errors import ConfigError
from ext.moe.dispatcher import DISPATCHERS, Hierarchical
from ext.moe.dispatchers.base import Dispatcher, count_locations
from ext.moe.reference import moe_reference
from ext.testing.ranks import run_ranks

# A group's global ranks and the world's ranks per node, by (nodes, ranks per node) of the group: 2x2 on every
# second rank, 2x3 around holes.
SHAPES = {
    (2, 4): (range(8), 4),
    (4, 2): (range(8), 2),
    (2, 2): ([1, 3, 5, 7], 4),
    (2, 3): ([0, 1, 2, 4, 5, 6], 4),
}
HIDDEN = 6
LOCAL_EXPERTS = 2


def _group(ranks, ranks_per_node: int, rank: int) -> RankGroup | None:
    process_group = dist.new_group(list(ranks))
    (group,) = rank_groups([process_group] if rank in ranks else [], ranks_per_node) or [None]
    return group


def _batch(case: str, k: int, num_experts: int, dtype: torch.dtype, seed: int):
    """Tokens, choices and weights of one rank; -1 here and there is a choice that is dropped."""
    generator = torch.Generator().manual_seed(seed)
    tokens = {"no tokens on odd ranks": 0 if seed % 2 else 5, "all to one expert": 4}.get(case, 3 + seed % 4)
    scores = torch.rand(tokens, num_experts, generator=generator)
    if case == "all to one expert":
        scores[:, num_experts - 1] = 2.0
    ids = scores.topk(k, 1).indices
    if case == "some dropped":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    probs = torch.rand(tokens, k, generator=generator, dtype=torch.float64)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return x.to(dtype).requires_grad_(), ids, probs.to(wide).requires_grad_()


def _weights(num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_experts, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def _layer(dispatcher: Dispatcher, batches, weight: torch.Tensor, capacity: int | None) -> list[torch.Tensor]:
    """All micro-batches dispatched before the first is combined; outputs and gradients."""
    weight = weight.clone().requires_grad_()
    batches = [(x.detach().requires_grad_(), ids, probs.detach().requires_grad_()) for x, ids, probs in batches]
    flying = []
    for x, ids, probs in batches:
        rows, counts, state = dispatcher.dispatch(x, ids, probs, capacity=capacity)
        if capacity is None:
            assert rows.shape == (sum(counts), HIDDEN)
            parts = [torch.tanh(part @ weight[i]) for i, part in enumerate(rows.split(counts))]
            flying.append((torch.cat(parts), state))
        else:
            assert rows.shape == (dispatcher.group.size, LOCAL_EXPERTS, capacity, HIDDEN)
            flying.append((torch.tanh(rows @ weight), state))
    outputs = [dispatcher.combine(rows, state) for rows, state in flying]
    sum((out * (1 + i)).square().sum() for i, out in enumerate(outputs)).backward()
    grads = [grad for x, _, probs in batches for grad in (x.grad, probs.grad)]
    return [*(out.detach() for out in outputs), *grads, weight.grad]


def _reference(batches, all_weights: torch.Tensor, mine: slice, group: RankGroup) -> list[torch.Tensor]:
    weight = all_weights.clone().requires_grad_()
    experts = [lambda row, e=e: torch.tanh(row @ weight[e]) for e in range(len(weight))]
    outputs = [moe_reference(x, ids, probs, experts) for x, ids, probs in batches]
    (sum((out * (1 + i)).square().sum() for i, out in enumerate(outputs)) + weight.sum() * 0).backward()
    dist.all_reduce(weight.grad, group=group.process_group)
    zeros = [torch.zeros_like(t) if t.grad is None else t.grad for x, _, probs in batches for t in (x, probs)]
    return [*(out.detach() for out in outputs), *zeros, weight.grad[mine]]


def _drop(ids: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    return torch.where(count_locations(ids, num_experts) < capacity, ids, -1)


def _compare(rank: int, world_size: int, everything: bool) -> int:
    compared = 0
    for ranks, ranks_per_node in SHAPES.values():
        group = _group(ranks, ranks_per_node, rank)
        if group is None:
            continue
        index, num_experts = list(ranks).index(rank), group.size * LOCAL_EXPERTS
        mine = slice(index * LOCAL_EXPERTS, (index + 1) * LOCAL_EXPERTS)
        linear = DISPATCHERS.get("linear")().build(group, num_experts)
        plain = [
            Hierarchical(Hierarchical.Config(order=order, deduplicate=False)).build(group, num_experts)
            for order in ("node_first", "rail_first")
        ]
        deduplicated = Hierarchical().build(group, num_experts)
        cases = ["random", "no tokens on odd ranks", "all to one expert", "some dropped"]
        # k = 1..4, each with another case, without and with a capacity that drops.
        for k, capacity in itertools.product((1, 2, 3, 4), (None, 2)):
            if not everything and group.size == 8 and (k + (capacity is None)) % 2:
                continue
            case = cases[(k + 2 * (capacity is None)) % len(cases)]
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                if dtype is not torch.float64 and (k != 2 or group.size > 6):
                    continue
                batches = [_batch(case, k, num_experts, dtype, index + 10 * i) for i in range(2)]
                if capacity is not None:
                    batches = [(x, _drop(ids, num_experts, capacity), probs) for x, ids, probs in batches]
                all_weights = _weights(num_experts, dtype)
                where = (ranks, k, capacity, case, dtype)
                expected = _layer(linear, batches, all_weights[mine], capacity)
                if dtype is torch.float64:
                    for a, b in zip(expected, _reference(batches, all_weights, mine, group), strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=str(where))
                for dispatcher in [*plain, deduplicated] if capacity is None else plain:
                    exact = dispatcher is not deduplicated or k <= 2
                    for a, b in zip(expected, _layer(dispatcher, batches, all_weights[mine], capacity), strict=True):
                        if exact:
                            assert torch.equal(a, b), (where, dispatcher.describe())
                        else:
                            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
                    compared += 1
    return compared


@pytest.mark.dist
def test_hierarchical_equals_linear_and_both_equal_the_reference():
    assert sum(run_ranks(_compare, 8, False)) == (8 + 8) * 2 * 5 + (4 + 6) * 4 * 5 + (4 + 6) * 3 * 5


@pytest.mark.dist
@pytest.mark.slow
def test_it_is_so_for_every_k_on_eight_ranks():
    assert sum(run_ranks(_compare, 8, True)) == (8 + 8 + 4 + 6) * 4 * 5 + (4 + 6) * 3 * 5


def _deduplicated_rows(rank: int, world_size: int) -> tuple[int, int]:
    group = _group(range(4), 2, rank)
    dispatcher = Hierarchical().build(group, 8)
    x, ids, probs = _batch("random", 4, 8, torch.float32, rank)
    x, ids, probs = (t.repeat(50, 1) for t in (x.detach(), ids, probs.detach()))
    _, _, state = dispatcher.dispatch(x, ids, probs)
    away = (ids // 4) != rank // 2
    return state.inner.rows_between_nodes, int(away.any(1).sum())


@pytest.mark.dist
def test_one_copy_of_a_token_per_node():
    assert all(sent == needed > 0 for sent, needed in run_ranks(_deduplicated_rows, 4))


def test_one_rank_and_flat_groups_are_linear(caplog):
    caplog.set_level("INFO", logger="ext.moe")
    alone = RankGroup.alone()
    x, ids, probs = _batch("some dropped", 2, 4, torch.float64, 3)
    weight = _weights(4, torch.float64)
    expected = moe_reference(x, ids, probs, [lambda row, w=w: torch.tanh(row @ w) for w in weight])
    for name in ("linear", "hierarchical", "auto"):
        dispatcher = DISPATCHERS.get(name)().build(alone, 4)
        assert dispatcher.describe().startswith("linear")
        for capacity in (None, 4):
            rows, counts, state = dispatcher.dispatch(x, ids, probs, capacity=capacity)
            if capacity is None:
                parts = [torch.tanh(part @ w) for part, w in zip(rows.split(counts), weight, strict=True)]
                output = dispatcher.combine(torch.cat(parts), state)
            else:
                assert int((rows != 0).any(-1).sum()) == int((ids >= 0).sum())  # the other slots are zero
                output = dispatcher.combine(torch.tanh(rows @ weight), state)
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    uneven = RankGroup(None, topology_of(range(5), list("aaabb")))
    for _ in range(2):
        DISPATCHERS.get("hierarchical")().build(uneven, 5)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings == ["MoE dispatch: 'hierarchical' is linear here: 5 ranks, unevenly placed: 3, 2 per node"]


def test_bad_configurations_are_refused():
    with pytest.raises(ConfigError, match=r"num_experts = 6 cannot be spread evenly over ep_size = 4"):
        DISPATCHERS.get("linear")().build(RankGroup(None, topology_of(range(4), list("aaaa"))), 6)
    with pytest.raises(ValueError, match="'deduplicate': true needs 'order': 'rail_first'"):
        Hierarchical.Config(order="node_first", deduplicate=True)
    with pytest.raises(ConfigError, match="unknown dispatcher 'hierarchial'. Did you mean 'hierarchical'"):
        DISPATCHERS.get("hierarchial")
