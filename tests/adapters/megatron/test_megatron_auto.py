"""`auto`, plan files and policies that need a profile: one plan on all ranks, the same losses, nothing consumed."""

import json
import os
from pathlib import Path

import pytest
import torch

from ext.core.errors import CommunicationError, ConfigError, DataError
from ext.pipeline.plan_file import read_plan
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

AUTO = {"type": "auto", "search_seconds": 0.2}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}


def _function(schedule, name="ext.{}".format, tolerance=0.0, **recompute):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    block = {"pipeline": {"schedule": schedule, "tolerance": tolerance}}
    return PlanForwardBackward(ExtConfig.from_block({**block, **({"recompute": recompute} if recompute else {})}), name)


def _same_on_all_ranks(value):
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, value)
    return all(other == value for other in everyone)


class _Counted:
    """An iterator with no more than a next, as Megatron's own, that counts what it gave."""

    def __init__(self, items):
        self._items = iter(items)
        self.count = 0

    def __next__(self):
        self.count += 1
        return next(self._items)


def _step(function, data, **config):
    """Losses, gradients and random state of one step, and what another step would still get from its iterator."""
    from ext.adapters.megatron import testing

    model = testing.build(**config)
    testing.seed()
    model.zero_grad_buffer()
    iterator = _Counted(testing.batches(len(data) + 2))
    store = function(
        forward_step_func=testing.forward_step, data_iterator=iterator, model=[model], num_microbatches=len(data),
        seq_length=testing.SEQ, micro_batch_size=2,
    )  # fmt: skip
    losses = [entry["lm loss"].item() for entry in store]
    return losses, testing.gradients(model), torch.get_rng_state(), iterator.count


def _equal(found, expected, atol=0.0):
    assert found[0] == expected[0]
    for name, gradient in expected[1].items():
        assert torch.allclose(found[1][name], gradient, rtol=0.0, atol=atol), name
    assert torch.equal(found[2], expected[2])
    assert found[3] == expected[3] == 6


def _auto_and_its_file(rank, world_size, folder, tp, pp):
    from ext.adapters.megatron import testing

    os.environ["EXT_RUN_DIR"] = folder
    data = testing.batches(6)
    testing.parallel(tp=tp, pp=pp)
    expected = _step(_function("1f1b"), data, **DROPOUT)
    auto = _function(AUTO, policy="stage_aware", memory_budget_gib=1.0)
    # a tied weight's contributions may be added in another order
    _equal(_step(auto, data, **DROPOUT), expected, atol=1e-6)
    found = auto.describe()
    assert found["policy"] == "as searched (auto)"
    assert _same_on_all_ranks(found["plan_hash"])
    plan = read_plan(Path(folder) / "ext_plan.json")
    assert plan.hash == found["plan_hash"]
    resolved = json.loads((Path(folder) / "ext_resolved_config.json").read_text())
    assert resolved["plan"]["hash"] == found["plan_hash"]
    assert resolved["plan"]["search"]["presets"]["1f1b"] > 0
    again = _function({"type": "plan_file", "path": str(Path(folder) / "ext_plan.json")})
    _equal(_step(again, data, **DROPOUT), expected, atol=1e-6)
    assert again.describe()["plan_hash"] == found["plan_hash"]
    assert again.describe()["policy"] == "as in the plan's file"
    with pytest.raises(ConfigError, match="is for 2 ranks and 6 micro-batches, this run has 2 and 4"):
        _step(_function({"type": "plan_file", "path": str(Path(folder) / "ext_plan.json")}), data[:4])


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_auto_is_one_plan_that_a_later_run_takes_from_its_file(tmp_path, tp, pp):
    run_ranks(_auto_and_its_file, tp * pp, str(tmp_path), tp, pp)


def _auto_where_nothing_splits(rank, world_size):
    """Layers whose weight gradients cannot wait, on one rank: the search leaves all backwards whole."""
    from ext.adapters.megatron import planning, testing

    testing.parallel(pp=2)
    if rank == 1:
        planning.undeferrable_layers = lambda model: ["TELinear"]
    function = _function(AUTO)
    _step(function, testing.batches(6))
    orders = function.describe()["orders"]
    assert not any(" W" in order or "I" in order for order in orders.values())
    assert _same_on_all_ranks(orders)


def test_auto_splits_no_backward_where_a_rank_cannot():
    run_ranks(_auto_where_nothing_splits, 2)


def _stage_aware(rank, world_size):
    from ext.adapters.megatron import testing

    data = testing.batches(6)
    testing.parallel(pp=2)
    model = {**DROPOUT, "num_layers": 8}
    expected = _step(_function("1f1b"), data, **model)
    needs = {}
    for policy in ("none", "full"):
        function = _function("1f1b", policy=policy, memory_budget_gib=1.0)
        _equal(_step(function, data, **model), expected)
        needs[policy] = [row.total for row in function.memory]
    assert needs["full"][0] < needs["none"][0]
    budgets = [(needs["none"][0] + needs["full"][0]) / 2, needs["none"][1]]
    function = _function("1f1b", policy="stage_aware", memory_budget_gib=[b / 2**30 for b in budgets])
    _equal(_step(function, data, **model), expected)
    first, last = [row.recomputed for row in function.memory]
    assert 0 < first < 4
    assert last == 0
    assert sum(function.recomputes.values()) == 6 * (first, last)[rank]
    assert _same_on_all_ranks(function.describe()["plan_hash"])
    assert all(row.total <= budget for row, budget in zip(function.memory, budgets, strict=True))
    # too little for anything: one text on all ranks, keys as typed
    small = _function("1f1b", "--{}".format, policy="stage_aware", memory_budget_gib=0.0001)
    with pytest.raises(ConfigError, match="--recompute.memory_budget_gib: ") as error:
        _step(small, data, **model)
    assert _same_on_all_ranks(str(error.value))
    kept = _function("1f1b", policy="none", memory_budget_gib=[b / 2**30 for b in budgets])
    with pytest.raises(ConfigError, match=r"(?s)stage 0 needs .* the policy none .* fits: ext.recompute.policy \["):
        _step(kept, data, **model)


def test_stage_aware_keeps_the_budget_of_each_stage():
    run_ranks(_stage_aware, 2)


def _counted(rank, world_size, schedule):
    """What autograd and the engine hold in a step, counted, against the prediction from the profile."""
    from ext.adapters.megatron import schedule as schedule_module
    from ext.adapters.megatron import testing
    from ext.adapters.megatron.step import Step
    from ext.runtime.live_bytes import LiveBytes

    testing.parallel(pp=2)
    model = testing.build(deallocate_pipeline_outputs=False)
    function = _function(schedule, policy="none", memory_budget_gib=1.0)
    lazily = (testing.batches(1, start)[0] for start in range(8))  # what is not held is freed
    testing.train(function, model, lazily, num_microbatches=4)
    steps = []

    def held():
        for flight in steps[-1]._flights if steps else ():
            yield from (t for t in (flight.inputs, None if rank else flight.outputs) if isinstance(t, torch.Tensor))

    class Watched(Step):
        def __post_init__(self):
            super().__post_init__()
            steps.append(self)

        def _checked(self, *args):
            counter.sample()
            return super()._checked(*args)

    schedule_module.Step = Watched
    counter = LiveBytes([*model.parameters(), *(b for m in model.modules() for b in m._buffers.values())], held)
    with counter.saved():
        testing.train(function, model, lazily, num_microbatches=4)
    assert function.memory[rank].activations == counter.peak


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_activations_are_predicted_to_the_byte(schedule):
    run_ranks(_counted, 2, schedule)


def _reported(rank, world_size, folder):
    """Asked for by the environment alone; left out where Megatron itself recomputes, which no profile sees."""
    from ext.adapters.megatron import testing

    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
    testing.parallel()
    data = testing.batches(2)
    function, other = _function("1f1b"), _function("1f1b")
    losses = testing.train(function, testing.build(), data)
    assert [row.stage for row in function.memory] == [0]
    assert function.describe()["policy"] == "none (the schedule's own)"
    model = testing.build()
    model.config.recompute_granularity = "selective"
    assert testing.train(other, model, data) == losses
    assert other.memory == []


def test_the_memory_report_of_any_run(tmp_path):
    run_ranks(_reported, 1, str(tmp_path), env={"EXT_MEMORY_REPORT": "1"})
    assert (tmp_path / "stderr").read_text().count("predicted memory per stage") == 1


def _failing(rank, world_size):
    """A forward step that fails while it is profiled, and data that is not there, are the same error on all ranks."""
    from ext.adapters.megatron import testing

    testing.parallel(pp=2)
    model, function = testing.build(), _function(AUTO)
    arguments = {"model": [model], "num_microbatches": 2, "seq_length": testing.SEQ, "micro_batch_size": 2}

    def forward_step(data, chunk):
        if rank == 1:
            raise KeyError("of the model")
        return testing.forward_step(data, chunk)

    with pytest.raises(KeyError if rank == 1 else CommunicationError, match="of the model"):
        function(forward_step_func=forward_step, data_iterator=iter(testing.batches(2)), **arguments)
    with pytest.raises(DataError, match="needs 2 micro-batches, the data iterator gave 0"):
        function(forward_step_func=testing.forward_step, data_iterator=iter(()), **arguments)
    with pytest.raises(DataError, match="needs 2 micro-batches, the data iterator gave 1"):
        testing.train(function, model, testing.batches(1), num_microbatches=2)
    assert testing.train(function, model, testing.batches(2)) == testing.train(
        _function("1f1b"), model, testing.batches(2)
    )


def test_a_profile_that_fails_is_one_error_on_all_ranks():
    run_ranks(_failing, 2, timeout=40)


def _router_counts(rank, world_size):
    """A profile leaves what routers count and log, and the bias that follows from it, as they were."""
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.moe.router import TopKRouter

    from ext.adapters.megatron import testing

    torch._dynamo.config.disable = True  # what torch compiles for Megatron needs Triton
    testing.parallel(pp=2)
    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    options = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, **balance}
    counted = {}
    for budget in (None, 1.0):
        model = testing.build(**options, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
        model.config.finalize_model_grads_func = None  # it starts the counts again
        get_moe_layer_wise_logging_tracker().clear()
        clear_aux_losses_tracker()
        recompute = {} if budget is None else {"policy": "none", "memory_budget_gib": budget}
        testing.train(_function("1f1b", **recompute), model, testing.batches(4))
        counts = [m.local_tokens_per_expert.clone() for m in model.modules() if isinstance(m, TopKRouter)]
        logged = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].clone()
        counted[budget] = torch.cat([*counts, logged])
    assert counted[None].abs().sum() > 0
    assert torch.equal(counted[None], counted[1.0])


def test_a_profile_counts_nothing_at_routers():
    run_ranks(_router_counts, 2)
