"""Experts of megatron-core: spread over ranks as on one, in two hops bit-equal to one, under plans and recompute."""

import re

import pytest
import torch

from ext.core.errors import ConfigError, RoutingError
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_router_load_balancing_type": "none",
    "num_layers": 2,
}  # fmt: skip


PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "variable_seq_lengths": True}
AUTO = {"type": "auto", "probe_seconds": 0.3}


def _build(kind, ranks_per_node=2, **config):
    """The model with the dispatcher ``kind``; None for Megatron's own."""
    from ext.adapters.megatron import moe, testing
    from ext.config import ExtConfig

    if kind is None:
        return testing.build(**{**MOE, **config})
    import patches

    with patches.applied("megatron_token_dispatcher"):
        model = testing.build(**{**MOE, **config})
    block = {"moe": {"dispatcher": kind, "topology": {"ranks_per_node": ranks_per_node}}}
    text = moe.connect(model, ExtConfig.from_block(block)).describe()
    assert text.startswith(kind if isinstance(kind, str) else kind["type"]), text
    return model


def _function(schedule=None, policy=None):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    if schedule is None:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        return get_forward_backward_func()
    recompute = {} if policy is None else {"recompute": {"policy": policy}}
    return PlanForwardBackward(ExtConfig.from_block({"pipeline": {"schedule": schedule}, **recompute}))


def _spread(rank, world_size):
    from ext.adapters.megatron import testing

    data = testing.batches(2, start=10 * rank)
    testing.parallel()
    whole = _build(None)
    losses = testing.train(_function(), whole, data)
    reference = testing.gradients(whole)
    testing.parallel(ep=4)
    stock = _build(None)
    stock_losses = testing.train(_function(), stock, data)
    stock_gradients = testing.gradients(stock)
    assert stock_losses == pytest.approx(losses, abs=1e-6)
    node_first = {"type": "hierarchical", "order": "node_first"}
    for kind in ("linear", "hierarchical", node_first, AUTO):
        for function in (_function(), _function("1f1b", "full"), _function("zb_h1")):
            model = _build(kind)
            assert testing.train(function, model, data) == stock_losses
            for name, gradient in testing.gradients(model).items():
                assert torch.equal(gradient, stock_gradients[name]) or "embedding" in name, (kind, name)
                assert (gradient - reference[name]).abs().max() < 1e-6, (kind, name)
    # capacities: every expert's rows travel, empty or not
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    expected = None
    for kind in (None, "linear", "hierarchical", AUTO):
        model = _build(kind, **capacity)
        found = testing.train(_function(), model, data), testing.gradients(model)
        expected = expected or found
        assert found[0] == expected[0]
        assert all(torch.equal(g, expected[1][name]) for name, g in found[1].items())
    assert expected[0] != stock_losses

    from ext.adapters.megatron.moe import ExchangeTokenDispatcher

    # what `auto` chose, with both times; alike on all ranks
    (dispatcher, *_) = (m.token_dispatcher for m in model.modules() if hasattr(m, "token_dispatcher"))
    assert isinstance(dispatcher, ExchangeTokenDispatcher)
    return dispatcher.connection.describe()


def test_experts_over_four_ranks_on_two_nodes():
    texts = run_ranks(_spread, 4)
    assert len(set(texts)) == 1
    size = r"(linear|hierarchical) at [\d.]+ KiB with a capacity: linear [\d.e-]+ ms, hierarchical [\d.e-]+ ms"
    assert re.fullmatch(rf"auto \({size}\)", texts[0]), texts[0]


def _bad_input(rank, world_size):
    """The errors of every rank: two expert-parallel groups, of which one alone sees what is wrong."""
    from ext.adapters.megatron import testing
    from ext.runtime import alarm

    alarm.GRACE_S = 60.0  # on a machine of any speed all ranks come together before
    texts = []

    def refused(kind, data, poison=None, **config):
        model = _build(kind, **config)
        if poison is not None and rank == poison:
            layer = list(model.module.decoder.layers)[-1]
            layer.mlp.router.weight.data.fill_(float("nan"))
        with pytest.raises(RoutingError) as error:
            testing.train(_function("1f1b"), model, data)
        texts.append(str(error.value))

    testing.parallel(ep=2, pp=2)
    refused("linear", testing.batches(2), poison=0)
    testing.parallel(ep=2)
    refused("linear", testing.batches(2), poison=3)
    refused("linear", testing.batches(2, lengths=[16, 8 + 4 * (rank % 2)]), **PADDED)
    # other numbers of tokens go on where nothing is padded
    model = _build("linear", variable_seq_lengths=True)
    testing.train(_function("1f1b"), model, testing.batches(2, lengths=[16, 1 + 4 * (rank % 2)]))
    with pytest.raises(ConfigError) as error:
        _build("linear", ranks_per_node=3)
    return [*texts, str(error.value)]


def test_what_one_expert_parallel_group_sees_is_the_same_error_on_all_ranks():
    results = run_ranks(_bad_input, 4)
    assert results[0] == results[1] == results[2] == results[3]
    nan = "MoE layer {}: the router's logits are NaN or infinite on rank {}: 32 of 32 tokens."
    capacity = "different values of capacity, which follows from the number of tokens: 8 on rank {}, 12 on rank {}."
    for text, part in zip(
        results[0],
        [
            nan.format(1, 0),
            nan.format(2, 3),
            capacity.format(0, 1),
            "ext.moe.topology.ranks_per_node: 3 does not divide the world size 4",
        ],
        strict=True,
    ):
        assert part in text


def _with_pipeline(rank, world_size):
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.moe.router import TopKRouter

    from ext.adapters.megatron import testing

    testing.parallel(pp=2, ep=2)
    data = testing.batches(4, start=10 * parallel_state.get_data_parallel_rank())
    stock = _build(None)
    losses = testing.train(_function(), stock, data)
    gradients = testing.gradients(stock)
    for schedule in ("shifted_critical_path", "early_recompute", "zb_h1"):
        model = _build("linear")
        assert testing.train(_function(schedule), model, data) == losses
        for name, gradient in testing.gradients(model).items():
            assert torch.allclose(gradient, gradients[name], atol=0 if schedule != "zb_h1" else 1e-7), (schedule, name)

    # a re-run counts and logs nothing a second time
    counted = {}
    for policy in ("none", "full"):
        balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
        model = _build(None, **balance, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
        model.config.finalize_model_grads_func = None  # it starts the counts again
        clear_aux_losses_tracker()
        testing.train(_function("1f1b", policy), model, data)
        counts = [m.local_tokens_per_expert.clone() for m in model.modules() if isinstance(m, TopKRouter)]
        logged = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].clone()
        counted[policy] = torch.cat([*counts, logged])
    assert counted["none"].abs().sum() > 0
    assert torch.equal(counted["none"], counted["full"])


def test_experts_inside_a_pipeline():
    run_ranks(_with_pipeline, 4)
