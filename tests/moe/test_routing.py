"""Which routes a capacity keeps equals the reference, one route at a time; losses and statistics, their formulas."""

import pytest
import torch

from ext.moe import losses
from ext.moe.dispatchers.base import count_locations
from ext.moe.reference import kept_reference
from ext.moe.routing import Priority, kept_weights, select, top_k
from ext.moe.statistics import Load, RouterStatistics, take_loads, update_bias

EXPERTS = 5


@pytest.mark.parametrize("priority", list(Priority))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_kept_routes(priority, k, tokens):
    generator = torch.Generator().manual_seed(k)
    weights = (3 * torch.randn(tokens, EXPERTS, generator=generator, dtype=torch.float64)).softmax(1)
    random = torch.rand(tokens, EXPERTS, generator=generator)
    ids = top_k(weights, k)
    for capacity in (1, 4, 30):
        selection = select(ids, weights, EXPERTS, capacity, priority, random=random)
        expected = kept_reference(ids, weights, capacity, priority.value, random)
        assert torch.equal(selection.is_kept, expected)
        assert selection.counts.tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]
        slots = (ids * capacity + selection.locations)[expected]
        assert len(slots.unique()) == len(slots)
        assert ((selection.locations >= 0) & (selection.locations < capacity))[expected].all()
        assert torch.equal(selection.kept_ids[expected], ids[expected])
        assert (selection.kept_ids[~expected] == -1).all()


def test_without_capacity_all_used_tokens_are_kept():
    weights = torch.rand(6, EXPERTS)
    selection = select(top_k(weights, 2), weights, EXPERTS, None, used_tokens=torch.tensor([1, 1, 0, 1, 0, 1]))
    assert selection.is_kept.all(1).tolist() == [True, True, False, True, False, True]
    assert selection.counts.sum() == 8
    assert selection.capacity is selection.locations is None


def test_locations_count_up_by_expert():
    ids = torch.tensor([[2, 0], [-1, 2], [0, -1], [2, 0]])
    locations = count_locations(ids, 3)
    assert locations[ids >= 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_weights_of_kept_routes():
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]], requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 2]])
    selection = select(ids, weights, 3, 1)  # expert 1 has room for one: token 1's first choice
    assert selection.is_kept.tolist() == [[True, False], [True, True]]
    torch.testing.assert_close(kept_weights(weights, selection, normalize=False), torch.tensor([[0.5, 0], [0.6, 0.3]]))
    probs = kept_weights(weights, selection, normalize=True)
    torch.testing.assert_close(probs, torch.tensor([[1, 0], [2 / 3, 1 / 3]]))
    (grad,) = torch.autograd.grad(probs[1, 0], weights)
    torch.testing.assert_close(grad[1], torch.tensor([0, 0.3, -0.6]) / 0.81)


def test_losses():
    torch.manual_seed(0)
    logits = torch.randn(7, EXPERTS, dtype=torch.float64)
    weights, t = logits.softmax(1), 7
    ids = top_k(weights, 3)
    first = [int((ids[:, 0] == e).sum()) for e in range(EXPERTS)]
    total = [int((ids == e).sum()) for e in range(EXPERTS)]
    sums = weights.sum(0).tolist()
    gshard = EXPERTS / t**2 * sum(s * c for s, c in zip(sums, first, strict=True))
    assert losses.gshard_loss(weights, ids[:, 0]).item() == pytest.approx(gshard)
    every = EXPERTS / t**2 / 3 * sum(s * c for s, c in zip(sums, total, strict=True))
    assert losses.top_k_loss(weights, torch.tensor(total), 3).item() == pytest.approx(every)
    z = sum(torch.log(row.exp().sum()).item() ** 2 for row in logits) / t
    assert losses.z_loss(logits).item() == pytest.approx(z)
    importance = torch.tensor(sums, dtype=torch.float64)
    threshold = logits.gather(1, ids).min(1, keepdim=True).values
    load = (0.5 * (1 + torch.erf((logits - threshold) / 0.2 / 2**0.5))).sum(0)
    expected = sum((v.var() / v.mean() ** 2).item() for v in (importance, load)) / 2
    assert losses.load_importance_loss(logits, logits.gather(1, ids), 0.2).item() == pytest.approx(expected)
    even = torch.full((10, EXPERTS), 1 / EXPERTS)
    assert losses.gshard_loss(even, torch.arange(10) % EXPERTS).item() == pytest.approx(1)


def test_losses_without_tokens_are_zero_with_a_gradient():
    logits = torch.zeros(0, EXPERTS, requires_grad=True)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    for loss in (
        losses.gshard_loss(logits.softmax(1), ids[:, 0]),
        losses.top_k_loss(logits.softmax(1), torch.zeros(EXPERTS), 2),
        losses.z_loss(logits),
        losses.load_importance_loss(logits, logits[:, :2], 1.0),
    ):
        assert loss.item() == 0
        loss.backward()


def test_statistics_and_bias():
    statistics = RouterStatistics(3)
    weights = torch.rand(9, 3)
    for _ in range(2):
        statistics.add(select(torch.zeros(9, 1, dtype=torch.int64), weights, 3, 4))
    (load,) = take_loads([statistics], None, weights.device)
    assert load == Load((18, 0, 0), 10)
    assert load.dropped_share == pytest.approx(10 / 18)
    assert load.max_over_mean == 3
    assert take_loads([statistics], None, weights.device) == [Load((0, 0, 0), 0)]
    bias = torch.zeros(3)
    update_bias(bias, Load((18, 9, 0), 0), 0.5)
    assert bias.tolist() == [-0.5, 0, 0.5]


def test_a_bias_evens_out_the_load():
    torch.manual_seed(0)
    logits = torch.randn(512, EXPERTS) + torch.tensor([2.0, 0, 0, 0, -2.0])
    weights, bias = logits.softmax(1), torch.zeros(EXPERTS)
    worst = []
    for _ in range(150):
        selection = select(top_k(weights + bias, 2), weights, EXPERTS, None)
        load = Load(tuple(selection.counts.tolist()), 0)
        worst.append(load.max_over_mean)
        update_bias(bias, load, 0.01)
    assert worst[0] > 2
    assert worst[-1] < 1.15
