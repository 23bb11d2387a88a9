"""The routing of DeepSpeed's TopKGate, route by route: same experts, slots, weights and random numbers."""

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate
from torch import nn

from ext.adapters.deepspeed.moe_gate import GateRouter
from ext.comm.topology import RankGroup
from ext.core.errors import ConfigError, RoutingError
from ext.core.replay import Memory
from ext.moe.router import RouterConfig

TOKENS, HIDDEN, EXPERTS = 48, 8, 6


def _gate(k: int, **options) -> TopKGate:
    torch.manual_seed(0)
    options = {"capacity_factor": 0.8, "min_capacity": 2, **options}
    return TopKGate(HIDDEN, EXPERTS, k, eval_capacity_factor=options["capacity_factor"], **options)


CASES = [
    {"k": 1},
    {"k": 1, "use_rts": False, "capacity_factor": 9.0},
    {"k": 1, "noisy_gate_policy": "RSample"},
    {"k": 1, "noisy_gate_policy": "Jitter", "drop_tokens": False},
    {"k": 2},
    {"k": 2, "top2_2nd_expert_sampling": False},
    {"k": 2, "drop_tokens": False},
    {"k": 3},
    {"k": 4, "drop_tokens": False},
    {"k": 4, "min_capacity": 40},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_same_as_the_gate_of_the_host(options, training):
    gate = _gate(**options).train(training)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    torch.manual_seed(3)
    l_aux, capacity, _, ids, locations, probs, counts = gate(x, None, True)
    (probs * torch.arange(1.0, TOKENS + 1)).sum().backward()
    (grad, grad_x), x.grad, gate.wg.weight.grad = (gate.wg.weight.grad, x.grad), None, None
    after = torch.get_rng_state()

    torch.manual_seed(3)
    router = GateRouter(gate, RouterConfig(), "1.moe")
    routing = router(x, None, RankGroup.alone())
    selection = routing.selection
    (routing.probs * torch.arange(1.0, TOKENS + 1).unsqueeze(1)).sum().backward()
    assert torch.equal(selection.kept_ids, ids.t().long())
    if gate.drop_tokens:
        assert selection.capacity == int(capacity)
        kept = selection.is_kept
        assert torch.equal(selection.locations[kept], locations.t().long()[kept])
        assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(routing.probs, probs.t() * selection.is_kept, rtol=0, atol=0)
    assert torch.equal(selection.counts, counts)
    torch.testing.assert_close(routing.l_aux, l_aux)
    torch.testing.assert_close(gate.wg.weight.grad, grad)
    torch.testing.assert_close(x.grad, grad_x)


def test_used_tokens_of_the_host():
    gate = _gate(1, use_rts=False, capacity_factor=9.0)
    x, used = torch.randn(TOKENS, HIDDEN), (torch.arange(TOKENS) % 3 > 0).long()
    l_aux, _, _, ids, _, _, counts = gate(x, used, True)
    routing = GateRouter(gate, RouterConfig(), "1.moe")(x, used, RankGroup.alone())
    assert torch.equal(routing.selection.kept_ids, ids.t().long())
    assert torch.equal(routing.selection.counts, counts)
    torch.testing.assert_close(routing.l_aux, l_aux)


def test_k_and_capacity_factor_of_a_call():
    gate = _gate(2)
    router = GateRouter(gate, RouterConfig(), "1.moe")
    x = torch.randn(TOKENS, HIDDEN)
    alone = RankGroup.alone()
    assert router(x, None, alone).selection.capacity == 13  # ceil(48 / 6 * 0.8 * 2)
    assert router(x, None, alone, capacity_factor=2.0).selection.capacity == 32
    routing = router(x, None, alone, top_k_of_call=1, capacity_factor=1.0)
    assert routing.selection.capacity == 8
    assert routing.probs.shape == (TOKENS, 1)
    with pytest.raises(RoutingError, match=r"MoE layer 1\.moe: k = 7, allowed are 1 to 6"):
        router(x, None, alone, top_k_of_call=7)
    with pytest.raises(RoutingError, match=r"k = 0, allowed are 1 to 6, .* capacity factor -1, allowed are finite"):
        router(x, None, alone, top_k_of_call=0, capacity_factor=-1.0)
    with pytest.raises(ConfigError, match=r"MoE layer 1\.moe: k = 7, allowed are 1 to 6"):
        GateRouter(_gate(7), RouterConfig(), "1.moe")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_refused(bad):
    x = torch.randn(TOKENS, HIDDEN)
    x[5, 2] = bad
    with pytest.raises(RoutingError, match=r"MoE layer 1\.moe: .* rank 0: 1 of 48 tokens"):
        GateRouter(_gate(2), RouterConfig(), "1.moe")(x, None, RankGroup.alone())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_rerun_keeps_the_decision_and_the_random_numbers(k):
    router = GateRouter(_gate(k, noisy_gate_policy="RSample"), RouterConfig(), "1.moe")
    x = torch.randn(TOKENS, HIDDEN)
    memory, state = Memory(), torch.get_rng_state()
    with memory.recording():
        first = router(x, None, RankGroup.alone())
    after = torch.get_rng_state()
    router.gate.wg.weight.data.neg_()  # would choose other experts
    torch.set_rng_state(state)
    with memory.replaying():
        again = router(x, None, RankGroup.alone())
    assert again.selection is first.selection
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(again.probs, first.probs)
    assert router.statistics.num_calls == 1


def test_options_of_the_router():
    x = torch.randn(TOKENS, HIDDEN)
    alone = RankGroup.alone()

    def routed(**options):
        return GateRouter(_gate(2, top2_2nd_expert_sampling=False), RouterConfig(**options), "1.moe")(x, None, alone)

    plain = routed()
    assert routed(loss="none").l_aux == 0
    z = routed(z_loss=0.5).l_aux - plain.l_aux
    logits = x @ _gate(2).wg.weight.t()
    torch.testing.assert_close(z, 0.5 * logits.logsumexp(1).square().mean())
    assert torch.equal(routed(loss="gshard").l_aux, plain.l_aux)
    assert 0 < routed(loss="load_importance").l_aux < 10
    kept = {name: routed(priority=name).selection.is_kept for name in ("position", "batch", "probs", "random")}
    assert torch.equal(kept["position"], plain.selection.is_kept)
    assert len({tuple(k.flatten().tolist()) for k in kept.values()}) == 4


def test_a_bias_changes_the_choice_but_not_the_weights():
    router = GateRouter(_gate(2), RouterConfig(bias_rate=0.1), "1.moe")
    x = torch.randn(TOKENS, HIDDEN)
    router.bias[3] = 9.0
    routing = router(x, None, RankGroup.alone(), capacity_factor=9.0)
    assert (routing.selection.topk_ids[:, 0] == 3).all()
    weights = (x @ router.gate.wg.weight.t()).softmax(1).gather(1, routing.selection.topk_ids)
    torch.testing.assert_close(routing.probs, weights / weights.sum(1, keepdim=True))


def test_a_layer_measured_alone_does_the_work_of_one_rank():
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import LayerSpec

    from ext.adapters.deepspeed.specs import profile_specs

    class Block(nn.Module):
        def __init__(self, ep_size: int, **options) -> None:
            super().__init__()
            self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, ep_size, k=2, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x)[0]

    specs = [LayerSpec(Block, 3), LayerSpec(Block, 2, drop_tokens=False)]
    batch = (torch.randn(2, 24, HIDDEN), torch.zeros(2, 24, HIDDEN))
    layers, _ = profile_specs(specs, [True, True], None, batch, torch.float32)
    assert [layer.trained for layer in layers] == [EXPERTS * HIDDEN + n * (HIDDEN + 1) * HIDDEN for n in (2, 3)]
    assert all(layer.forward > 0 for layer in layers)
