"""The byte counter counts what autograd holds, each storage once, as long as it lives."""

import torch
from torch import nn

from ext.recompute.regions import DroppedLayer, MicrobatchRegions
from ext.runtime.live_bytes import LiveBytes, storage_bytes

FLOAT = 4


def test_saved_storages_count_once_until_the_backward():
    x = torch.randn(10, requires_grad=True)
    counter = LiveBytes()
    with counter.saved():
        y = x.exp()  # saves its output
        z = (y * y).sum()  # saves it twice more
    assert counter.now == counter.peak == 10 * FLOAT
    z.backward()
    del y
    assert counter.now == 0
    assert counter.peak == 10 * FLOAT
    assert torch.equal(x.grad, 2 * x.detach().exp() * x.detach().exp())


def test_views_count_as_their_whole_storage_and_parameters_not_at_all():
    layer = nn.Linear(8, 8)
    whole = torch.randn(4, 8)
    counter = LiveBytes(layer.parameters())
    with counter.saved():
        out = layer(whole[:1])
    assert counter.now == whole.untyped_storage().nbytes()
    del whole
    out.sum().backward()
    del out
    assert counter.now == 0


def test_a_dropped_layer_counts_while_it_is_brought_back():
    layer = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    counter = LiveBytes(layer.parameters())
    for early in (False, True):
        regions = MicrobatchRegions(around_reruns=counter.reruns)
        counter.peak = 0
        with counter.saved():
            out = DroppedLayer(layer, regions)(torch.randn(5, 16))
        stash = counter.now
        assert stash == 5 * 16 * FLOAT
        if early:
            regions.recompute()
            assert counter.now == stash + 5 * 64 * FLOAT
        else:
            assert counter.now == stash
        with regions.backward():
            out.sum().backward()
        del out
        assert counter.peak == stash + 5 * 64 * FLOAT
        assert counter.now == 0


def test_held_tensors_count_beside_saved_ones():
    buffers = [torch.randn(100)]
    x = torch.randn(10, requires_grad=True)
    counter = LiveBytes(held=lambda: buffers)
    with counter.saved():
        y = x.exp()
        buffers.append(y)
        counter.sample()
    assert counter.now == 10 * FLOAT
    assert counter.peak == 110 * FLOAT


def test_created_storages_count_while_they_live():
    counter = LiveBytes()
    with counter.created():
        a = torch.ones(100)
        b = a + 1
        del a
        c = b.view(10, 10) * 2
    assert counter.peak == 200 * FLOAT
    assert counter.now == 200 * FLOAT
    del b, c
    assert counter.now == 0


def test_bytes_of_storages():
    tensor = torch.zeros(6, dtype=torch.int64)
    assert storage_bytes([tensor, tensor[1:], tensor.view(2, 3), torch.zeros(2)]) == 6 * 8 + 2 * FLOAT
