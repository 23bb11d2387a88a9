"""Dropped layers of a TransformerBlock: bit-equal with dropout, as many as asked on each stage."""

import pytest
import torch

from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist


def _function(schedule, policy=None):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    recompute = {} if policy is None else {"recompute": {"policy": policy}}
    return PlanForwardBackward(ExtConfig.from_block({"pipeline": {"schedule": schedule}, **recompute}))


def _dropout(rank, world_size, tp, pp, sequence_parallel):
    from ext.adapters.megatron import testing

    data = testing.batches(4)
    config = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "sequence_parallel": sequence_parallel}
    results = {}
    wanted = {
        ("1f1b", "none"): 0,
        ("1f1b", "full"): 4 * 4 // pp,
        ("early_recompute", None): 4 * 4 // pp,
        ("shifted_critical_path", None): 0 if rank // tp == pp - 1 else 4 * 4 // pp,
        ("zb_h1", "full"): 4 * 4 // pp,
        ("zb_h1", "none"): 0,
    }
    if pp == 2:
        wanted["1f1b", (2, 1)] = 4 * (2, 1)[rank // tp]
        wanted["early_recompute", (1, 0)] = 4 * (1, 0)[rank // tp]
    for (schedule, policy), reruns in wanted.items():
        testing.parallel(tp=tp, pp=pp)
        model = testing.build(**config)
        function = _function(schedule, policy)
        testing.seed()
        losses = testing.train(function, model, data)
        results[schedule, policy] = losses, testing.gradients(model), torch.get_rng_state()
        assert sum(function.recomputes.values()) == reruns, (schedule, policy)
    # Dropout draws in the order of the forwards, so it is the same wherever layers are dropped.
    losses, gradients, state = results["1f1b", "none"]
    for name, (found, others, random) in results.items():
        assert found == losses, name
        assert torch.equal(random, state), name
        for key, gradient in gradients.items():
            if name[0] == "zb_h1" and key.startswith("embedding.word"):
                assert torch.allclose(others[key], gradient, atol=1e-7)
            else:
                assert torch.equal(others[key], gradient), (name, key)
    # and it is there: other streams give another loss
    testing.seed(8)
    others = testing.train(_function("1f1b"), testing.build(**config), data)
    assert not losses or others != losses


@pytest.mark.parametrize(("tp", "pp", "sequence_parallel"), [(1, 2, False), (2, 1, False), (2, 1, True)])
def test_dropout_is_the_same_with_and_without_recompute(tp, pp, sequence_parallel):
    run_ranks(_dropout, 2, tp, pp, sequence_parallel)


def test_dropout_under_tensor_and_pipeline_parallelism():
    run_ranks(_dropout, 4, 2, 2, True)


def _memory(rank, world_size):
    """What a dropped layer keeps: its input and nothing else; all of it is gone after the step."""
    from ext.adapters.megatron import testing

    testing.parallel()
    kept = {}
    for policy in ("none", "full"):
        model, bytes_kept = testing.build(), []

        def pack(tensor, bytes_kept=bytes_kept):
            bytes_kept.append(tensor.untyped_storage().data_ptr())
            return tensor

        function = _function("gpipe", policy)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            testing.train(function, model, testing.batches(2))
        kept[policy] = len(set(bytes_kept))
    assert kept["full"] < kept["none"]
    layers = model.module.decoder.layers
    assert not any("forward" in vars(layer) for layer in layers)


def test_layers_are_as_before_after_a_step():
    run_ranks(_memory, 1)


def _nested_streams(rank, world_size):
    """A stream forked inside itself, whose entry in the tracker's table is out of date when the layer starts."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from ext.adapters.megatron import testing
    from ext.adapters.megatron.layers import MegatronRngTracker
    from ext.recompute.regions import MicrobatchRegions

    testing.parallel()
    tracker, masks = get_cuda_rng_tracker(), []

    def layer(x):
        with tracker.fork():
            masks.append(torch.nn.functional.dropout(x, 0.5))
        return masks[-1].square()

    regions = MicrobatchRegions((MegatronRngTracker(),))
    x = torch.ones(64, requires_grad=True)
    with tracker.fork():
        torch.rand(3)
        y = regions.call(layer, x)
    before = tracker.get_states()
    with regions.backward():
        y.sum().backward()
    assert torch.equal(*masks)
    assert all(torch.equal(state, before[name]) for name, state in tracker.get_states().items())


def test_a_stream_inside_itself_is_restored():
    run_ranks(_nested_streams, 1)
