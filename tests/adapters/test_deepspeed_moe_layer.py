"""The converted DeepSpeed MoE layer on real ranks, against DeepSpeed's own and against the one-process reference."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ext.core.errors import ConfigError, RoutingError
from ext.moe.reference import kept_reference, moe_reference
from ext.testing.ranks import run_ranks

HIDDEN, EXPERTS = 8, 8


class Expert(nn.Module):
    """Two linear layers; dropout shows that random numbers are where DeepSpeed has them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.up(x))))


def _built(ep_size: int, dropout: float = 0.0, **options) -> nn.Module:
    """A stock layer without process groups, whose expert e is the same whatever ep_size is."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    moe = MoE(HIDDEN, Expert(dropout), EXPERTS, ep_size, **{"min_capacity": 1, **options})
    first = dist.get_rank() % ep_size * moe.num_local_experts
    for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
        generator = torch.Generator().manual_seed(first + local)
        for parameter in expert.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return moe


def _stock(ep_size: int, **options) -> nn.Module:
    moe = _built(ep_size, **options)
    moe.set_deepspeed_parallelism()
    return moe


def _converted(ep_size: int, dispatcher: str = "linear", ranks_per_node: int = 2, **options) -> nn.Module:
    """The same layer converted and connected as ext.initialize does it."""
    from ext.adapters.deepspeed import moe
    from ext.moe.dispatcher import DISPATCHERS

    model = nn.ModuleDict({"layer": _built(ep_size, **options)})
    keys = list(model.state_dict())
    moe.convert(model)
    moe.convert(model)  # a second walk changes nothing
    assert list(model.state_dict()) == keys
    model["layer"].set_deepspeed_parallelism()
    monitor = SimpleNamespace(enabled=False)
    engine = SimpleNamespace(module=model, has_moe_layers=False, monitor=monitor, optimizer=None, mpu=None)
    config = DISPATCHERS.get(dispatcher).Config(**({"probe_seconds": 0.1} if dispatcher == "auto" else {}))
    moe.connect(engine, config, ranks_per_node)
    return model["layer"]


def _tokens(rank: int, count: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def _run(layer: nn.Module, x: torch.Tensor, **call) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    x = x.detach().requires_grad_()
    output, l_aux, counts = layer(x, **call)
    ((output * output.detach().cos()).sum() + 0.1 * l_aux).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    return {"output": output.detach(), "l_aux": l_aux.detach(), "counts": counts, "x": x.grad, **grads}


def _against_stock(rank: int, world_size: int) -> None:
    x = _tokens(rank, 24).view(2, 12, HIDDEN)
    cases = [
        (2, {"k": 1}),
        (4, {"k": 1, "use_residual": True, "dropout": 0.3}),
        (4, {"k": 2, "capacity_factor": 0.7, "dropout": 0.3}),
        (2, {"k": 3, "capacity_factor": 0.5}),
        (4, {"k": 2, "drop_tokens": False}),
        (1, {"k": 2, "drop_tokens": False}),
    ]
    for ep_size, options in cases:
        expected = _run(_stock(ep_size, **options), x)
        for dispatcher in ("linear", "hierarchical", "auto"):
            found = _run(_converted(ep_size, dispatcher, **options), x)
            for name, value in expected.items():
                # Same rows in the same order give the same bits, but for sums over another number of rows.
                exact = options.get("drop_tokens", True) and options["k"] < 3 and "gate" not in name
                where = f"{ep_size} {options} {dispatcher} {name}"
                tolerance = {"rtol": 0, "atol": 0} if exact and name not in ("x", "l_aux") else {}
                torch.testing.assert_close(found[name], value, msg=lambda text, w=where: f"{w}: {text}", **tolerance)


def _against_reference(rank: int, world_size: int) -> None:
    """Ranks with 10, 16, 0 and 7 tokens: same capacity, same output and gradients as one process."""
    counts = [10, 16, 0, 7]
    x = _tokens(rank, counts[rank], torch.float64)
    for k, ep_size, dispatcher in [(1, 4, "linear"), (2, 2, "linear"), (3, 4, "hierarchical"), (4, 4, "auto")]:
        for options in ({"drop_tokens": False}, {"capacity_factor": 0.5}):
            options = {"k": k, "use_rts": False, "top2_2nd_expert_sampling": False, **options}
            layer = _converted(ep_size, dispatcher, **options).double()
            found = _run(layer, x)
            capacity = None
            if "capacity_factor" in options:
                first = rank // ep_size * ep_size
                most = max(counts[first : first + ep_size])
                capacity = max(-(-most * k // 16), 1)  # ceil(tokens / 8 * 0.5 * k)
            expected = _reference(layer, x, k, capacity, ep_size)
            for name, value in expected.items():
                assert found[name] is not None, f"{name} has no gradient"
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def _reference(layer: nn.Module, x: torch.Tensor, k: int, capacity: int | None, ep_size: int) -> dict:
    """Output, gradient of x and of the router of this rank, and of its experts summed over all ranks."""
    group = layer.deepspeed_moe.dispatcher.group.process_group
    first = dist.get_rank() % ep_size * layer.num_local_experts
    experts = []
    for e in range(EXPERTS):
        generator = torch.Generator().manual_seed(e)
        experts.append(Expert())
        for parameter in experts[-1].parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.5).double()
    x = x.detach().requires_grad_()
    wg = layer.deepspeed_moe.gate.wg.weight.detach().clone().requires_grad_()
    weights = (x @ wg.t()).softmax(1)
    ids = weights.topk(k, 1).indices
    kept = torch.ones_like(ids, dtype=torch.bool)
    if capacity is not None:
        kept = kept_reference(ids, weights, capacity, "probs" if k > 2 else "position")
    probs = weights.gather(1, ids) * kept
    if k > 1:
        probs = probs / probs.sum(1, keepdim=True).clamp(min=1e-15)
    output = moe_reference(x, torch.where(kept, ids, -1), probs, experts)
    wanted = torch.zeros_like(weights).scatter_(1, ids if k > 2 else ids[:, :1], 1.0)
    tokens = max(len(x), 1)
    l_aux = (weights.sum(0) / tokens * wanted.sum(0) / tokens).sum() * EXPERTS / (k if k > 2 else 1)
    nothing = sum(p.sum() * 0 for e in experts for p in e.parameters()) + x.sum() * 0
    ((output * output.detach().cos()).sum() + 0.1 * l_aux + nothing).backward()
    grads = {"output": output.detach(), "l_aux": l_aux.detach(), "x": x.grad, "deepspeed_moe.gate.wg.weight": wg.grad}
    for e, expert in enumerate(experts):
        for name, parameter in expert.named_parameters():
            dist.all_reduce(parameter.grad, group=group)
            if first <= e < first + layer.num_local_experts:
                grads[f"deepspeed_moe.experts.deepspeed_experts.{e - first}.{name}"] = parameter.grad
    return grads


def _all_to_one_expert(rank: int, world_size: int) -> None:
    x = _tokens(rank, 6)
    for options in ({"k": 1, "drop_tokens": False}, {"k": 2, "capacity_factor": 1.0}):
        layer = _converted(4, "hierarchical", **options)
        layer.deepspeed_moe.gate.wg.weight.data.zero_()  # equal weights: everybody wants expert 0
        result = _run(layer, x)
        grads = {n: g for n, g in result.items() if "experts" in n}
        assert result["counts"][0] == 6
        assert all(g is not None for g in grads.values())
        is_idle = [bool((g == 0).all()) for n, g in grads.items() if n.endswith("up.bias")]
        busy = [False, options["k"] == 1] if rank == 0 else [True, True]
        assert options["k"] == 2 or is_idle == busy


def _bad_input(rank: int, world_size: int) -> list[str]:
    """The errors of every rank, which must be one text."""
    from deepspeed.moe.layer import MoE

    from ext.adapters.deepspeed import moe

    texts = []

    def refused(kind, call):
        with pytest.raises(kind) as error:
            call()
        texts.append(str(error.value))

    x = _tokens(rank, 5 + rank)
    layer = _converted(4, "linear", k=2)
    bad = x.detach().clone()
    if rank == 2:
        bad[1, 0] = float("nan")
    refused(RoutingError, lambda: layer(bad))
    refused(RoutingError, lambda: layer(x, top_k=1 + rank // 2))
    refused(RoutingError, lambda: layer(x, capacity_factor=1.0 + rank % 2))
    refused(RoutingError, lambda: layer(x.double() if rank == 1 else x))
    # What one rank alone is given must not leave the others waiting.
    refused(RoutingError, lambda: layer(x, top_k=9))
    refused(RoutingError, lambda: layer(x, top_k=9 if rank == 0 else 2))
    refused(RoutingError, lambda: layer(x, capacity_factor=float("nan") if rank % 2 else 1.0))
    refused(RoutingError, lambda: layer(torch.ones(3, 9) if rank == 1 else x))
    refused(RoutingError, lambda: layer(x, torch.ones(3) if rank == 3 else None))
    _run(layer, x, top_k=3, capacity_factor=2.0)  # and the layer still works
    refused(ConfigError, lambda: _converted(2, k=9))
    refused(ConfigError, lambda: _converted(4, "hierarchical", ranks_per_node=3))
    refused(ConfigError, lambda: _converted(4, "hierarchical", ranks_per_node=1 + rank // 2))
    refused(ConfigError, lambda: _converted(4, "linear" if rank else "hierarchical"))
    for ep_size in (8, 2 if rank == 1 else 4):
        texts += moe.problems(nn.ModuleDict({"layer": MoE(HIDDEN, Expert(), EXPERTS, ep_size)}))
    uneven = MoE(HIDDEN, Expert(), EXPERTS, 4)
    uneven.num_experts, uneven.ep_size = 6, 4  # where python -O runs no assertion of DeepSpeed's
    texts += moe.problems(nn.ModuleDict({"layer": uneven}))
    refused(ConfigError, lambda: moe.DispatchMoE(HIDDEN, Expert(), 6, 4))
    return texts


def _all_cases(rank: int, world_size: int) -> list[str]:
    _against_stock(rank, world_size)
    _against_reference(rank, world_size)
    _all_to_one_expert(rank, world_size)
    return _bad_input(rank, world_size)


@pytest.mark.dist
def test_the_layer_on_four_ranks():
    errors = run_ranks(_all_cases, 4)
    assert errors[0] == errors[1] == errors[2] == errors[3]
    expected = [
        "MoE layer layer: the router's logits are NaN or infinite on rank 2: 1 of 7 tokens.",
        "different values of k: 1 on rank 0, 1 on rank 1, 2 on rank 2, 2 on rank 3.",
        "different values of capacity factor: 1 on rank 0, 2 on rank 1, 1 on rank 2, 2 on rank 3.",
        "different values of dtype: torch.float32 on rank 0, torch.float64 on rank 1, torch.float32 on rank 2, ",
        "MoE layer layer: k = 9, allowed are 1 to 8, the number of experts.",
        "MoE layer layer: rank 0: k = 9, allowed are 1 to 8, the number of experts.",
        "MoE layer layer: ranks 1, 3: capacity factor nan, allowed are finite numbers from 0.",
        "MoE layer layer: rank 1: tokens of width 9 and torch.float32, the layer takes floating-point tokens of width",
        "MoE layer layer: rank 3: a mask of 3 used tokens for 8 tokens.",
        "MoE layer layer: k = 9, allowed are 1 to 8",
        "ext.moe.topology.ranks_per_node: 3 does not divide the world size 4.",
        "ranks_per_node: differs between ranks: 1 on rank 0, 1 on rank 1, 2 on rank 2, 2 on rank 3. Give all ranks",
        "ext.moe.dispatcher: differs between ranks: rank 0: {'type': 'hierarchical'",
        "MoE layer layer: ep_size = 8 does not divide the 4 data-parallel ranks (8 experts). Use ep_size 1, 2, 4, or",
        "MoE layers on rank 0: layer: 8 experts, ep_size 4; on rank 1: layer: 8 experts, ep_size 2. Build the same",
        "MoE layer layer: num_experts = 6 cannot be spread evenly over ep_size = 4 ranks. Use ep_size 1, 2, 3, 6, or",
        "MoE layer of hidden size 8: num_experts = 6 cannot be spread evenly over ep_size = 4 ranks.",
    ]
    assert len(errors[0]) == len(expected)
    for text, part in zip(errors[0], expected, strict=True):
        assert part in text


def test_layers_that_cannot_be_converted(monkeypatch):
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    from ext.adapters.deepspeed import moe

    monkeypatch.setenv("WORLD_SIZE", "12")
    model = nn.ModuleDict({name: MoE(HIDDEN, Expert(), 8, ep_size) for name, ep_size in (("a", 8), ("b", 2), ("c", 1))})
    model["b"].deepspeed_moe = type("Mine", (MOELayer,), {})(*(model["b"].deepspeed_moe.gate, nn.Identity(), "g", 2, 4))
    model["c"].deepspeed_moe.gate.__class__ = type("MyGate", (TopKGate,), {})
    problems = moe.problems(model, num_stages=3)
    assert [text.partition(".")[0] for text in problems] == [
        "MoE layer a: ep_size = 8 does not divide the 4 data-parallel ranks of each of the 3 stages (8 experts)",
        "MoE layer b: its deepspeed_moe is a Mine, whose forward ext",
        "MoE layer c: its gate is a MyGate, whose routing ext",
    ]
    assert "Use ep_size 1, 2, 4, or" in problems[0]
    fresh = nn.ModuleDict({"a": MoE(HIDDEN, Expert(), 8, 2)})
    moe.convert(fresh)
    with pytest.raises(ConfigError, match=r"MoE layer a: its ranks are not connected yet\. .* ext\.initialize"):
        fresh["a"](torch.zeros(2, HIDDEN))
