"""Unit policies on Megatron's layers: the bits of no recomputation, budgets kept, layers without units whole."""

import random
from dataclasses import replace

import pytest
import torch

from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

SLACK = 2048  # bytes by which two profiles may differ: threads of collectives let go of tensors when they like
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}


def _function(schedule, **recompute):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    return PlanForwardBackward(ExtConfig.from_block({"pipeline": {"schedule": schedule}, "recompute": recompute}))


def _step(function, **config):
    from ext.adapters.megatron import testing

    model = testing.build(**{**DROPOUT, **config})
    testing.seed()
    losses = testing.train(function, model, testing.batches(6))
    return losses, testing.gradients(model), torch.get_rng_state()


def _equal(found, expected, case):
    assert found[0] == expected[0], case
    for name, gradient in expected[1].items():
        # with a split backward a tied weight's two contributions are added in another order
        atol = 1e-6 if case[0] == "zb_h1" and name.startswith("embedding.word") else 0.0
        assert torch.allclose(found[1][name], gradient, rtol=0.0, atol=atol), (case, name)
    assert torch.equal(found[2], expected[2]), case


def _squeezed(rows, shares):
    """GiB of every stage but a share of its activations; of several stages the last has a share of its own."""
    first, last = shares if isinstance(shares, tuple) else (shares, shares)
    by_stage = [first] * (len(rows) - 1) + [last]
    return [(row.total - share * row.activations + SLACK) / 2**30 for row, share in zip(rows, by_stage, strict=True)]


def _lynx(rank, world_size, tp, pp, cases, config):
    from ext.adapters.megatron import testing

    testing.parallel(tp=tp, pp=pp)
    reference = {}
    for schedule, policy, share, overlap in cases:
        if schedule not in reference:
            function = _function(schedule, policy="none", memory_budget_gib=1.0)
            reference[schedule] = _step(function, **config), function.memory
        expected, rows = reference[schedule]
        budgets = _squeezed(rows, share)
        function = _function(schedule, policy=policy, memory_budget_gib=budgets, overlap=overlap)
        _equal(_step(function, **config), expected, (schedule, policy))
        assert all(row.total <= budget * 2**30 for row, budget in zip(function.memory, budgets, strict=True))
        tables = function.tables.stages[rank // tp]
        assert sum(function.recomputes.values()) == 6 * tables.num_units, (schedule, policy)
        assert tables.num_units > 0 or (schedule == "zb_h1" and rank // tp == pp - 1), (schedule, policy)
        hashes = [None] * world_size
        torch.distributed.all_gather_object(hashes, function.describe()["plan_hash"])
        assert len(set(hashes)) == 1


CASES = [
    ("1f1b", "lynx_heu", 0.3, True),
    ("1f1b", "lynx_opt", 0.3, True),
    ("early_recompute", "lynx_heu", 0.3, False),
    ("gpipe", "lynx_heu", 0.5, True),
    ("zb_h1", "lynx_heu", (0.15, 0.0), True),
]


def test_units_of_a_pipeline():
    run_ranks(_lynx, 2, 1, 2, CASES, {})


def test_units_of_tensor_parallel_layers():
    run_ranks(_lynx, 2, 2, 1, CASES[:1], {"sequence_parallel": True})


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_units_of_a_tensor_parallel_pipeline(sequence_parallel):
    run_ranks(_lynx, 4, 2, 2, CASES, {"sequence_parallel": sequence_parallel}, timeout=120)


def _windows(rank, world_size, sequence_parallel):
    """What the tables give to windows under all-reduces runs there, in forwards and backwards, and changes no bit."""
    from ext.adapters.megatron import planning, testing
    from ext.recompute.units import AllReduces

    testing.parallel(tp=2)
    plain = _function("gpipe", policy="none", memory_budget_gib=1.0)
    expected = _step(plain, sequence_parallel=sequence_parallel)
    take = planning.Plans.take

    def with_long_waits(plans, measured):
        """As if every all-reduce took a second."""
        assert all((c is None or c.all_reduces is None) == sequence_parallel for c in measured.units[1:])
        units = [c and replace(c, all_reduces=c.all_reduces and AllReduces(1.0, 1.0, 1.0, 1.0)) for c in measured.units]
        take(plans, replace(measured, units=tuple(units)))

    planning.Plans.take = with_long_waits
    function = _function("gpipe", policy="lynx_heu", memory_budget_gib=_squeezed(plain.memory, 0.6))
    _equal(_step(function, sequence_parallel=sequence_parallel), expected, ("gpipe", sequence_parallel))
    used = {name: use.units for name, use in function.recompute_report.windows.items() if use.units}
    assert set(used) & {"F1", "F2", "B1", "B2"} == (set() if sequence_parallel else set(used) - {"C"}), used
    assert sequence_parallel or len(used) > 1, used


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputes_run_under_all_reduces(sequence_parallel):
    run_ranks(_windows, 2, sequence_parallel)


UNITS = (
    "input_layernorm", "linear_qkv", "core_attention", "residual",
    "pre_mlp_layernorm", "linear_fc1", "activation", "output",
)  # fmt: skip
DECISIONS = ("keep", "unused", "C", "P", "F1", "F2", "B1", "B2", "nowhere")


def _drawn_tables(rank, world_size, tp, pp, seeds):
    """Steps under tables drawn by lot, the same for the ranks that share a layer, whatever windows they name."""
    from ext.adapters.megatron import planning, testing
    from ext.recompute.table import UnitTable

    testing.parallel(tp=tp, pp=pp)
    units_of, used = planning.Plans.units_of, set()

    def drawn(plans, num_microbatches, stage):
        units = units_of(plans, num_microbatches, stage)
        draw = random.Random(f"{seed} {stage}")
        tables = [UnitTable.of({name: draw.choice(DECISIONS) for name in UNITS}) for _ in units.tables.tables]
        units.tables = replace(units.tables, tables=tuple(tables))
        units.reserve.limit = draw.choice((0, 30_000, None))
        return units

    for schedule in ("1f1b", "gpipe", "early_recompute", "zb_h1"):
        planning.Plans.units_of = units_of
        expected = _step(_function(schedule, policy="none"))
        planning.Plans.units_of = drawn
        for seed in seeds:
            function = _function(schedule, policy="lynx_heu", memory_budget_gib=1.0)
            _equal(_step(function), expected, (schedule, seed))
            assert function.recompute_report.repeated == 0
            used |= {name for name, use in function.recompute_report.windows.items() if use.units}
    return used


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_table_changes_a_number_of_tensor_parallel_layers(pp):
    used = set().union(*run_ranks(_drawn_tables, 2 * pp, 2, pp, range(4), timeout=120))
    assert used >= {"B2", "C", "F2"}


def _other_layers(rank, world_size):
    """Grouped queries, a gated MLP without biases; and experts, which have no units."""
    from ext.adapters.megatron import testing
    from ext.adapters.megatron.layers import transformer_layers
    from ext.adapters.megatron.units import has_units

    gated = {
        "num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False, "activation_func":
        torch.nn.functional.silu, "num_layers": 2,
    }  # fmt: skip
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "num_layers": 2}
    torch._dynamo.config.disable = True  # what torch compiles for Megatron needs Triton
    testing.parallel()
    for config, expected in ((gated, True), (experts, False)):
        assert [has_units(layer) for layer in transformer_layers(testing.build(**config))] == [expected] * 2
        _lynx(rank, world_size, 1, 1, [("1f1b", "lynx_heu", 0.3, True)], config)


def test_layers_of_other_kinds():
    run_ranks(_other_layers, 1)


def _units_are_the_layer(rank, world_size):
    """The units in a row give the layer's own output, and what they are given is what the layer was."""
    from ext.adapters.megatron import testing
    from ext.adapters.megatron.layers import transformer_layers
    from ext.adapters.megatron.units import LayerOfUnits

    testing.parallel()
    (layer, *_) = transformer_layers(testing.build(**DROPOUT))
    hidden = torch.randn(testing.SEQ, 2, testing.HIDDEN)
    mask = torch.ones(testing.SEQ, testing.SEQ).triu(1).bool()[None, None]
    whole = LayerOfUnits(layer)
    rotary = torch.randn(testing.SEQ, 1, 1, testing.HIDDEN // testing.HEADS)
    found = []
    for given in ({}, {"rotary_pos_emb": rotary}):
        results = []
        for run in (lambda given=given: layer(hidden, mask, **given)[0], lambda: whole(hidden)):
            whole.bind(attention_mask=mask, **given)
            testing.seed()
            results.append(run())
        assert torch.equal(*results)
        found.append(results[0])
    whole.bind(mask.logical_not())
    testing.seed()
    found.append(whole(hidden))
    assert not any(torch.equal(found[i], found[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert "forward" not in vars(layer.self_attention.linear_proj)


def test_units_are_the_layer():
    run_ranks(_units_are_the_layer, 1)


class _Told:
    """Notes what it is told, and recomputes meanwhile what replaces the forwards of the layer that told it."""

    def __init__(self, recompute):
        self.events, self._recompute = [], recompute

    def forward_launched(self, work):
        self.events.append("forward")
        self._recompute()

    def backward_launched(self, work):
        self.events.append("backward")


def _announcements(rank, world_size, sequence_parallel):
    """A listener hears of every all-reduce, once, and changes no bit."""
    from ext.adapters.megatron import testing
    from ext.adapters.megatron.layers import transformer_layers
    from ext.adapters.megatron.units import LayerOfUnits
    from ext.comm.tensor_parallel.hooks import listening

    testing.parallel(tp=2)
    model = testing.build(**DROPOUT, sequence_parallel=sequence_parallel)
    layer = transformer_layers(model)[0]
    hooked = []
    layer.mlp.linear_fc2.register_forward_pre_hook(lambda *_: hooked.append(1))
    length = testing.SEQ // (world_size if sequence_parallel else 1)
    mask = torch.ones(testing.SEQ, testing.SEQ).triu(1).bool()[None, None]

    def recompute():
        with listening(None):
            LayerOfUnits(layer)._activate(torch.zeros(length, 2, layer.mlp.linear_fc2.weight.shape[1]))

    results, told = [], _Told(recompute)
    for listener in (None, told):
        testing.seed()
        hidden = torch.randn(length, 2, testing.HIDDEN).requires_grad_()
        whole = LayerOfUnits(layer)
        whole.bind(attention_mask=mask)
        with listening(listener):
            output = whole(hidden)
        wanted = [hidden, *layer.parameters()]
        results.append([output, *torch.autograd.grad(output.square().sum(), wanted)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert told.events == ([] if sequence_parallel else ["forward", "forward", "backward", "backward"])
    # once in its own place and once while the activation runs between the linear layers, with the listener and without
    # and in every recomputation of it
    assert len(hooked) == 4 + told.events.count("forward")
    assert not any("forward" in vars(module) for module in layer.modules())


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_listeners_hear_of_all_reduces(sequence_parallel):
    run_ranks(_announcements, 2, sequence_parallel)
