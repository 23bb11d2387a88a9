"""Evaluation, lengths that vary, data that ends early, refusals, and when an output's memory is given back."""

import pytest
import torch

from ext.core.errors import CommunicationError, ConfigError, DataError
from ext.testing.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.dist


def _function(schedule, **blocks):
    from ext.adapters.megatron.schedule import PlanForwardBackward
    from ext.config import ExtConfig

    return PlanForwardBackward(ExtConfig.from_block({"pipeline": {"schedule": schedule}, **blocks}))


def _host():
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()


def _evaluation_between(rank, world_size):
    """eval 2, train 4, eval 8, train 4, as one stage gives them; evaluation leaves gradients alone."""
    from ext.adapters.megatron import testing

    testing.parallel()
    whole = testing.build()
    counts = (2, 4, 8, 4)
    expected = [testing.train(_host(), whole, testing.batches(count)) for count in counts]
    testing.parallel(pp=2)
    for schedule in ("1f1b", "shifted_critical_path", "zb_h1"):
        model, function = testing.build(), _function(schedule)
        for count, losses in zip(counts, expected, strict=True):
            data = testing.batches(count)
            if count == 4:
                found = testing.train(function, model, data)
                before = testing.gradients(model)
            else:
                with torch.no_grad():
                    found = testing.run(function, model, data, forward_only=True, first_val_step=True)
            assert found == (losses if rank else [])
        assert all(torch.equal(g, before[name]) for name, g in testing.gradients(model).items())
        with torch.no_grad():  # what a caller collects instead of losses
            shapes = function(
                forward_step_func=lambda data, chunk: (testing.forward_step(data, chunk)[0], _shape),
                data_iterator=iter(testing.batches(1)), model=model, num_microbatches=1, seq_length=16,
                micro_batch_size=2, forward_only=True, collect_non_loss_data=True,
            )  # fmt: skip
        assert shapes == ([(2, 16)] if rank else [])


def _shape(output, non_loss_data):
    assert non_loss_data
    return tuple(output.shape)


def test_evaluation_between_training_steps():
    run_ranks(_evaluation_between, 2)


def _lengths(rank, world_size):
    from ext.adapters.megatron import testing

    data = testing.batches(4, lengths=(5, 7, 5, 3))
    testing.parallel()
    whole = testing.build()
    losses = testing.train(_host(), whole, data)
    reference = testing.gradients(whole)
    testing.parallel(pp=2)
    for schedule in ("1f1b", "shifted_critical_path", "zb_h1"):
        model = testing.build(variable_seq_lengths=True)
        found = testing.train(_function(schedule), model, data)
        assert found == (losses if rank else [])
        for name, gradient in testing.gradients(model).items():
            assert torch.allclose(gradient, reference[name], atol=1e-6)
    model, function = testing.build(), _function("1f1b")
    with pytest.raises(DataError, match=r"micro-batch 1: .* \[7, 2, 32\] float32, expected \[5, 2, 32\] .* Pad"):
        testing.train(function, model, data)
    # the same object goes on with data that fits
    assert testing.train(function, model, testing.batches(4)) == testing.train(_host(), model, testing.batches(4))


def test_lengths_that_vary():
    run_ranks(_lengths, 2)


def _short_iterator(rank, world_size):
    from ext.adapters.megatron import testing

    testing.parallel(pp=3)
    model, function = testing.build(num_layers=3), _function("1f1b")
    with pytest.raises(DataError, match="needs 4 micro-batches, the data iterator gave 3"):
        # Middle stages take no data, as in Megatron.
        testing.train(function, model, testing.batches(3 if rank != 1 else 4), num_microbatches=4)


def test_data_that_ends_early_is_one_error_on_all_ranks():
    run_ranks(_short_iterator, 3, timeout=40)


def _failing_rank(rank, world_size):
    from ext.adapters.megatron import testing

    testing.parallel(pp=2)
    model, function = testing.build(), _function("1f1b")

    def forward_step(data, chunk):
        if rank == 1:
            raise KeyError("of the model")
        return testing.forward_step(data, chunk)

    with pytest.raises(KeyError if rank == 1 else CommunicationError, match="of the model"):
        function(
            forward_step_func=forward_step, data_iterator=iter(testing.batches(2)), model=[model], num_microbatches=2,
            seq_length=16, micro_batch_size=2,
        )  # fmt: skip


def test_a_failing_rank_names_itself_to_the_others():
    run_ranks(_failing_rank, 2, timeout=40)


def _refusals(rank, world_size):
    from ext.adapters.megatron import testing

    data = testing.batches(2)
    testing.parallel(pp=2)
    with pytest.raises(ConfigError, match="needs at least 4 micro-batches"):
        testing.train(_function("shifted_critical_path"), testing.build(), data)
    with pytest.raises(ConfigError, match="stage 1 has 2 layers that can be recomputed, 3 asked"):
        testing.train(_function("1f1b", recompute={"policy": [0, 3]}), testing.build(), data)
    model = testing.build()
    with pytest.raises(ConfigError, match="model: 2 model chunks per rank"):
        _function("1f1b")(
            forward_step_func=testing.forward_step, data_iterator=iter(data), model=[model, model], num_microbatches=2,
            seq_length=16, micro_batch_size=2,
        )  # fmt: skip
    model = testing.build()
    model.config.num_layers = 5
    with pytest.raises(ConfigError, match=r"5 layers asked, \[2, 2\] were built on 2 stages, 4 in all"):
        testing.train(_function("1f1b"), model, data)
    model = testing.build()
    model.config.recompute_granularity = "selective"
    with pytest.raises(
        ConfigError, match=r"--recompute-granularity \(found selective\) cannot go with ext.recompute.po"
    ):
        testing.train(_function("1f1b", recompute={"policy": "full"}), model, data)
    # without a word on recomputation of ours, Megatron's own goes on working
    testing.train(_function("1f1b"), model, data)
    with pytest.raises(ConfigError, match="--recompute-granularity .* with a split backward"):
        testing.train(_function("zb_h1"), model, data)


def test_refusals():
    run_ranks(_refusals, 2, timeout=40)


def _deallocation(rank, world_size):
    """An output's storage is swapped for one number, yet what was sent is what arrives, whenever it leaves."""
    from ext.adapters.megatron import testing
    from ext.adapters.megatron.step import Step

    testing.parallel(pp=2)
    sizes = []
    send = Step._send_outputs

    def watched(step, stage, microbatch):
        send(step, stage, microbatch)
        sizes.append(step._flights[microbatch].outputs.numel())

    Step._send_outputs = watched
    from ext.adapters.megatron import step as module
    from ext.pipeline.actions import Kind

    module._HANDLERS[Kind.SEND_F] = watched
    data = testing.batches(4)
    found = {}
    for deallocate in (True, False):
        sizes.clear()
        model = testing.build(deallocate_pipeline_outputs=deallocate)
        found[deallocate] = testing.train(_function("gpipe"), model, data), testing.gradients(model)
        assert sizes == ([] if rank else [1 if deallocate else 16 * 2 * 32] * 4)
    assert found[True][0] == found[False][0]
    assert all(torch.equal(g, found[False][1][name]) for name, g in found[True][1].items())


def test_outputs_are_deallocated_without_harm_to_a_send_in_flight():
    run_ranks(_deallocation, 2)


def _stuck(rank, world_size, folder):
    import os
    import time

    from ext.adapters.megatron import testing

    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    testing.parallel(pp=3)
    model, function = testing.build(num_layers=3), _function("1f1b", watchdog=3)
    calls = []

    def forward_step(data, chunk):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            time.sleep(40)
        return testing.forward_step(data, chunk)

    function(
        forward_step_func=forward_step, data_iterator=iter(testing.batches(5)), model=[model], num_microbatches=5,
        seq_length=16, micro_batch_size=2,
    )  # fmt: skip


@pytest.mark.slow
def test_every_rank_reports_where_it_hangs(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_stuck, 3, str(tmp_path), timeout=60)
    reports = [(tmp_path / f"stderr{rank}").read_text() for rank in range(3)]
    assert all("watchdog: rank" in report for report in reports), failed.value
    assert "doing: 1F2" in reports[1]
    assert "waiting for micro-batch 1 of gradient from rank 1" in reports[0]
    assert "2F2, waiting for micro-batch 2 of stage input from rank 1" in reports[2]


def _split(rank, world_size):
    """In I no weight of a linear layer gets a gradient; all of them do in W."""
    from ext.adapters.megatron import step as module
    from ext.adapters.megatron import testing
    from ext.pipeline.actions import Kind

    testing.parallel(pp=2)
    model = testing.build(tied=False)
    during = []
    kinds = {"now": None}
    for kind in (Kind.I, Kind.W):
        handler = module._HANDLERS[kind]

        def traced(step, stage, microbatch, handler=handler, kind=kind):
            kinds["now"] = kind
            handler(step, stage, microbatch)
            kinds["now"] = None

        module._HANDLERS[kind] = traced
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: during.append((kinds["now"], name)))
    testing.train(_function("zb_h1"), model, testing.batches(4))
    linear = {name for name, p in model.module.named_parameters() if p.dim() == 2 and "embeddings" not in name}
    assert {name for kind, name in during if kind is Kind.W} == linear
    assert not {name for kind, name in during if kind is Kind.I} & linear
    assert len([name for _, name in during if name in linear]) == 4 * len(linear)


def test_weight_gradients_wait_for_their_action():
    run_ranks(_split, 2)
