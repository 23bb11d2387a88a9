"""Tensor-parallel layers on two and four ranks against one process that holds the whole layers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.comm.tensor_parallel.hooks import listening
from ext.comm.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_parallel_linear
from ext.comm.tensor_parallel.rng import RngStream
from ext.comm.tensor_parallel.vocabulary import VocabParallelEmbedding, VocabularyRange, vocab_parallel_cross_entropy
from ext.core.errors import ConfigError
from ext.testing.ranks import run_ranks

HIDDEN = 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # sums are taken in another order


class Whole(nn.Module):
    """Embedding, two linear layers, and a head tied to the embedding."""

    def __init__(self, vocab, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(vocab, HIDDEN, generator=generator, dtype=dtype))
        self.up, self.down = nn.Linear(HIDDEN, 3 * HIDDEN, dtype=dtype), nn.Linear(3 * HIDDEN, HIDDEN, dtype=dtype)
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, tokens, labels):
        hidden = functional.embedding(tokens, self.table)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return functional.cross_entropy((hidden @ self.table.T).flatten(0, 1), labels.flatten())


class Shared(nn.Module):
    """The same over the ranks of a group."""

    def __init__(self, whole, group):
        super().__init__()
        self.embedding = VocabParallelEmbedding(whole.table, group)
        self.up = ColumnParallelLinear(whole.up, group, blocks=3)
        self.down = RowParallelLinear(whole.down, group)

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return vocab_parallel_cross_entropy(self.embedding.logits(hidden), labels, self.embedding.range)


def expected_gradients(whole, group):
    return {
        "embedding.weight": VocabParallelEmbedding(whole.table.grad, group).weight.detach(),
        "up.weight": group.shard(whole.up.weight.grad, 0, 3),
        "up.bias": group.shard(whole.up.bias.grad, 0, 3),
        "down.weight": group.shard(whole.down.weight.grad, 1),
        "down.bias": whole.down.bias.grad,
    }


def order_columns(linear, size):
    """The columns in the order in which three blocks of hidden units end up on the ranks."""
    order = torch.arange(3 * HIDDEN).view(3, size, -1).transpose(0, 1).flatten()
    for tensor in (linear.weight, linear.weight.grad):
        tensor.data = tensor.detach()[:, order]


def against_whole(rank, world_size):
    group = TensorParallelGroup.of(dist.group.WORLD)
    found = {}
    for dtype in (torch.float64, torch.float32):
        for vocab in (16, 13, 5):  # 13 and 5 do not divide; with 4 ranks the last one has no token of 5
            whole = Whole(vocab, dtype)
            tokens, labels = torch.randint(vocab, (2, 3, 6), generator=torch.Generator().manual_seed(1))
            loss = whole(tokens, labels)
            loss.backward()
            order_columns(whole.down, world_size)
            shared = Shared(whole, group)
            mine = shared(tokens, labels)
            mine.backward()
            expected = expected_gradients(whole, group)
            assert expected.keys() == {name for name, _ in shared.named_parameters()}
            errors = [(mine - loss).abs().item()]
            errors += [(p.grad - expected[name]).abs().max().item() for name, p in shared.named_parameters()]
            found[str(dtype), vocab] = max(errors)
    return found


class Notes:
    """A listener that notes what was done when, and what the numbers were."""

    def __init__(self):
        self.events = []

    def forward_launched(self, work):
        self.events.append("forward")

    def backward_launched(self, work):
        self.events.append("backward")


def hooks(rank, world_size):
    group = TensorParallelGroup.of(dist.group.WORLD)
    notes = Notes()
    whole = Whole(16, torch.float32)
    shared = Shared(whole, group)
    events = notes.events
    original = group.start_all_reduce

    class Logged(TensorParallelGroup):
        def start_all_reduce(self, tensor, op=dist.ReduceOp.SUM):
            events.append("launch")
            return _Waited(original(tensor, op), events)

    logged = Logged(group.group, group.rank, group.size)
    x = torch.randn(4, HIDDEN, requires_grad=True)

    def unpacked(tensor):
        events.append("read input")
        return tensor

    with listening(notes), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
        y = column_parallel_linear(x, shared.up.weight, shared.up.bias, logged)
    del events[:]
    y.sum().backward()
    column = list(events)
    shared.down.group = logged
    del events[:]
    with listening(notes):
        shared.down(y.detach())
    row = list(events)
    del events[:]
    shared.down(y.detach())  # nobody listens
    return column, row, list(events)


class _Waited:
    def __init__(self, work, events):
        self._work, self._events = work, events

    def wait(self):
        self._events.append("wait")
        self._work.wait()


def streams(rank, world_size):
    torch.manual_seed(5)
    stream = RngStream(100 + rank)
    state = stream.capture()
    alike = [torch.rand(4)]
    with stream.fork():
        apart = torch.rand(4)
    alike.append(torch.rand(4))
    torch.manual_seed(5)
    undisturbed = all(torch.equal(torch.rand(4), numbers) for numbers in alike)
    stream.restore(state)
    with stream.fork():
        repeated = torch.equal(torch.rand(4), apart)
    return undisturbed, repeated, torch.cat(alike).tolist(), apart.tolist()


def everything(rank, world_size):
    return against_whole(rank, world_size), hooks(rank, world_size), streams(rank, world_size)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 4])
def test_layers_on_several_ranks(world_size):
    results = run_ranks(everything, world_size)
    for errors, (column, row, silent), (undisturbed, repeated, alike, _) in results:
        for (dtype, vocab), error in errors.items():
            assert error <= TOLERANCE[getattr(torch, dtype.removeprefix("torch."))], (dtype, vocab)
        assert column == ["launch", "read input", "backward", "wait"]
        assert row == ["launch", "forward", "wait"]
        assert silent == ["launch", "wait"]
        assert undisturbed
        assert repeated
        assert alike == results[0][2][2]
    assert len({tuple(apart) for _, _, (_, _, _, apart) in results}) == world_size


def test_one_rank_is_the_whole_layer():
    alone = TensorParallelGroup.alone()
    whole = Whole(13, torch.float64)
    tokens, labels = torch.randint(13, (2, 3, 6))
    shared = Shared(whole, alone)
    torch.testing.assert_close(shared(tokens, labels), whole(tokens, labels), rtol=0, atol=1e-12)


def test_norm_and_sharding_marks():
    shared = Shared(Whole(13, torch.float64), TensorParallelGroup.alone())
    split = {name for name, p in shared.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    assert split == {"embedding.weight", "up.weight", "up.bias", "down.weight"}


def test_ranges_cover_the_vocabulary_once():
    for vocab in range(1, 20):
        for size in (1, 2, 3, 4, 8):
            ranges = [VocabularyRange(vocab, TensorParallelGroup(None, rank, size)) for rank in range(size)]
            assert [token for r in ranges for token in range(r.first, r.last)] == list(range(vocab))
            assert {r.rows for r in ranges} == {-(-vocab // size)}


def test_widths_that_do_not_divide_are_refused():
    group = TensorParallelGroup(None, 0, 4)
    with pytest.raises(ConfigError, match="10 rows or columns .* 4 tensor-parallel ranks"):
        ColumnParallelLinear(nn.Linear(8, 10), group)
    with pytest.raises(ConfigError, match="24 rows or columns in 3 block.* 5"):
        ColumnParallelLinear(nn.Linear(8, 24), TensorParallelGroup(None, 0, 5), blocks=3)
    with pytest.raises(ConfigError, match="6 rows or columns"):
        RowParallelLinear(nn.Linear(6, 8), group)


def test_a_weight_changed_before_its_backward_is_found():
    layer = ColumnParallelLinear(nn.Linear(4, 4), TensorParallelGroup.alone())
    y = layer(torch.randn(2, 4, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        y.sum().backward()


def test_autocast_and_frozen_weights():
    linear = nn.Linear(4, 6)
    layer = ColumnParallelLinear(linear, TensorParallelGroup.alone())
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), linear(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    mine, x.grad = x.grad, None
    expected.float().sum().backward()
    assert torch.equal(mine, x.grad)
    assert torch.equal(layer.weight.grad, linear.weight.grad)
    layer.weight.requires_grad_(False)
    layer.weight.grad = None
    layer(x).sum().backward()
    assert layer.weight.grad is None
