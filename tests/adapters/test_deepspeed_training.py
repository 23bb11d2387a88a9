"""Training with the DeepSpeed engine: what a schedule must not change, and what must keep working."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ext
from ext.core.errors import CommunicationError, DataError
from ext.testing.oracle import oracle_step
from ext.testing.ranks import RanksFailed, run_ranks
from ext.testing.tiny_gpt import (
    HIDDEN,
    TinyBlock,
    TinyEmbedding,
    TinyHead,
    tied_logits,
    token_batch,
    token_loss,
)

pytestmark = pytest.mark.dist

SCHEDULES = ("1f1b", "gpipe", "early_recompute", "last_no_recompute", "shifted_critical_path")


def make_engine(
    layers: list[Any], num_stages: int, gas: int = 4, ext_block: dict[str, Any] | None = None, **more: Any
) -> Any:
    module_args = {key: more.pop(key) for key in ("dynamic_shape", "activation_checkpoint_interval") if key in more}
    module = PipelineModule(
        layers=layers, num_stages=num_stages, loss_fn=token_loss, partition_method="uniform", **module_args
    )
    for name in more.pop("frozen", ()):
        for parameter_name, parameter in module.named_parameters():
            if name in parameter_name:
                parameter.requires_grad_(False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **more,
    }
    if ext_block is not None:
        config["ext"] = ext_block
    return ext.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def gpt_layers(num_blocks: int = 4, **block_args: Any) -> list[Any]:
    blocks = [LayerSpec(TinyBlock, 10 + i, **block_args) for i in range(num_blocks)]
    return [LayerSpec(TinyEmbedding, 7), *blocks, LayerSpec(TinyHead, 8)]


def tied_layers(num_blocks: int, **block_args: Any) -> list[Any]:
    blocks = [LayerSpec(TinyBlock, 10 + i, **block_args) for i in range(num_blocks)]
    first = TiedLayerSpec("embedding", TinyEmbedding, 7, tied_weight_attr=["weight"])
    last = TiedLayerSpec("embedding", TinyEmbedding, 7, forward_fn=tied_logits, tied_weight_attr=["weight"])
    return [first, *blocks, last]


def batches(num: int, first: int = 0, **kwargs: Any) -> Any:
    return iter([token_batch(1000 + first + i, **kwargs) for i in range(num)])


def scheduled(name: str, policy: Any = None) -> dict[str, Any]:
    block: dict[str, Any] = {"pipeline": {"schedule": name}}
    return block if policy is None else {**block, "recompute": {"policy": policy}}


# -- numbers that no schedule and no recomputation may change ------------------------------------------------


def _losses_with_dropout(rank: int, world_size: int, steps: int) -> list[tuple[str, Any, list[str], list[int]]]:
    deepspeed.init_distributed("gloo")
    found = []
    per_stage = [1] * (world_size - 1) + [0]
    for name, policy in [*itertools.product(SCHEDULES, (None, "none", "full")), ("1f1b", per_stage)]:
        torch.manual_seed(5)
        engine = make_engine(gpt_layers(5, dropout=0.2), world_size, 5, scheduled(name, policy))
        losses = [engine.train_batch(batches(5, 5 * step)).item().hex() for step in range(steps)]
        description = ext.describe(engine)
        stage = engine.stage_id
        planned = engine.plan.recomputed_layers[stage] * 5
        found.append((name, policy, losses, [planned, description["recomputes"][str(stage)]]))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_are_bit_equal_over_20_steps_with_dropout(world_size):
    steps = 20 if world_size == 2 else 4
    by_rank = run_ranks(_losses_with_dropout, world_size, steps, timeout=150)
    for found in by_rank:
        expected = found[0][2]
        for name, policy, losses, (planned, counted) in found:
            assert losses == expected, (name, policy)
            assert planned == counted, (name, policy)
    plans = {(name, str(policy)): counts[1] for name, policy, _, counts in by_rank[0]}
    assert plans["1f1b", "None"] == 0
    assert plans["shifted_critical_path", "None"] > 0
    last = {(name, str(policy)): counts[1] for name, policy, _, counts in by_rank[-1]}
    assert last["shifted_critical_path", "None"] == 0
    assert last["early_recompute", "None"] > 0


# -- tied, frozen, tuples ------------------------------------------------------------------------------------


def _tied_and_frozen(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    slow = {"optimizer": {"type": "SGD", "params": {"lr": 0.02}}}
    for name in ("1f1b", "shifted_critical_path"):
        engine = make_engine(tied_layers(6), world_size, 4, scheduled(name), **slow)
        _train_and_check(engine, "tied")
        if "embedding" in engine.module.tied_modules:
            weight = engine.module.tied_modules["embedding"].weight.detach()
            copies = [torch.empty_like(weight) for _ in range(2)]
            group = engine.module.tied_comms["embedding"]["group"]
            torch.distributed.all_gather(copies, weight, group=group)
            assert torch.equal(*copies)

        adapters = [f".{part}." for part in ("qkv", "proj", "fc1")] + ["weight", "position"]
        engine = make_engine(gpt_layers(6), world_size, 4, scheduled(name), frozen=adapters, **slow)
        _train_and_check(engine, "adapters only")

        for stage in range(world_size):
            module_args = {"frozen": [""]} if rank == stage else {}
            engine = make_engine(gpt_layers(6), world_size, 4, scheduled(name), **module_args, **slow)
            _train_and_check(engine, f"stage {stage} frozen")


def _train_and_check(engine: Any, what: str) -> None:
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    for step in range(20):
        loss = engine.train_batch(batches(4, 4 * step))
        assert torch.isfinite(loss), what
    for name, parameter in engine.module.named_parameters():
        moved = not torch.equal(before[name], parameter)
        # One copy of a tied embedding's untied attribute is never used.
        if "position" not in name:
            assert moved == parameter.requires_grad, (what, name)


def test_tied_adapters_only_and_frozen_stages():
    run_ranks(_tied_and_frozen, 4, timeout=150)


class Split(nn.Module):
    """Gives hidden states and two masks to the next layer."""

    def __init__(self, mask_dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = TinyEmbedding(7)
        self.mask_dtype = mask_dtype

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding(ids), (ids % 3 > 0).to(self.mask_dtype)


class TwoStreams(nn.Module):
    """Two floating-point tensors that both carry a gradient, and one that carries none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.left, self.right = TinyBlock(seed), TinyBlock(seed + 1)

    def forward(self, inputs: Any) -> Any:
        left, right, scale = inputs if isinstance(inputs, tuple) else (inputs, inputs * 0.5, torch.tensor(2.0))
        return self.left(left) + right, self.right(right) * scale, scale


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = TinyHead(8)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.head(inputs[0] + inputs[1])


def _tuples(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    models: list[list[Any]] = [
        [LayerSpec(Split, dtype), *[LayerSpec(TinyBlock, i) for i in range(4)], LayerSpec(TinyHead, 8)]
        for dtype in (torch.bool, torch.int64)
    ]
    models.append([LayerSpec(TinyEmbedding, 7), *[LayerSpec(TwoStreams, 2 * i) for i in range(4)], LayerSpec(Merge)])
    for specs, name in itertools.product(models, SCHEDULES):
        engine = make_engine(specs, world_size, 4, scheduled(name))
        start = engine.module._local_start
        captured = _captured_gradients(engine)
        loss = engine.train_batch(batches(4))
        want = oracle_step([spec.build() for spec in specs], token_loss, batches(4))
        assert abs(loss.item() - want.loss.item()) < 1e-6
        for position, function in enumerate(engine.module.forward_funcs):
            for parameter_name, expected in want.gradients[start + position].items():
                got = captured[f"{start + position}.{parameter_name}"]
                assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7), (name, function, parameter_name)


def _captured_gradients(engine: Any) -> dict[str, torch.Tensor]:
    captured: dict[str, torch.Tensor] = {}
    take_step = engine._take_model_step

    def capture(*args: Any) -> Any:
        captured.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
        return take_step(*args)

    engine._take_model_step = capture
    return captured


def test_tuples_with_masks_and_several_gradients():
    run_ranks(_tuples, 3, timeout=120)


# -- evaluation, shapes, failures ----------------------------------------------------------------------------


def _evaluation_between(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    layers = [spec.build() for spec in gpt_layers()]
    for name, policy in itertools.product(SCHEDULES, ("none", "full")):
        engine = make_engine(gpt_layers(), world_size, 4, scheduled(name, policy))
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.5)
        for layer, spec in zip(layers, gpt_layers(), strict=True):
            layer.load_state_dict(spec.build().state_dict())
        for kind, num, seq in [("eval", 2, 16), ("train", 4, 16), ("eval", 8, 9), ("train", 4, 12)]:
            want = oracle_step(layers, token_loss, batches(num, seq=seq))
            if kind == "eval":
                got = engine.eval_batch(batches(num, seq=seq), num_micro_batches=num)
            else:
                got = engine.train_batch(batches(num, seq=seq))
                optimizer.step()
            assert abs(got.item() - want.loss.item()) < 2e-6, (name, policy, kind, num)
        assert all(slot is None for slots in engine.pipe_buffers.values() for slot in slots), name


def test_evaluation_between_training_steps():
    run_ranks(_evaluation_between, 2, timeout=120)


def _variable_lengths(rank: int, world_size: int, dynamic: bool, lengths: list[int]) -> list[str]:
    deepspeed.init_distributed("gloo")
    found = []
    for name in SCHEDULES:
        engine = make_engine(gpt_layers(), world_size, 4, scheduled(name), dynamic_shape=dynamic)
        data = [token_batch(i, seq=seq) for i, seq in enumerate(lengths)]
        try:
            loss = engine.train_batch(iter(data))
        except DataError as error:
            found.append(str(error))
            # The engine goes on: nothing of the failed step is left.
            loss = engine.train_batch(batches(4))
            data = list(batches(4))
        want = oracle_step([spec.build() for spec in gpt_layers()], token_loss, data)
        assert abs(loss.item() - want.loss.item()) < 1e-6
    return found


def test_lengths_that_differ_inside_a_step():
    assert run_ranks(_variable_lengths, 2, True, [5, 7, 5, 3]) == [[], []]
    for errors in run_ranks(_variable_lengths, 2, False, [5, 7, 5, 3]):
        assert len(errors) == len(SCHEDULES)
        for text in errors:
            assert "micro-batch 1" in text
            assert "[2, 7, 32]" in text
            assert "[2, 5, 32]" in text
            assert "dynamic_shape=True" in text


def _short_iterator(rank: int, world_size: int, zero: int, bf16: bool) -> list[str]:
    deepspeed.init_distributed("gloo")
    found = []
    for name in ("1f1b", "shifted_critical_path"):
        dp = world_size // 2
        options = {"zero_optimization": {"stage": zero}, "bf16": {"enabled": bf16}}
        engine = make_engine(gpt_layers(), 2, 4, scheduled(name), **options)
        again = make_engine(gpt_layers(), 2, 4, scheduled(name), **options)
        # Only one of the pipelines runs short.
        given = 3 if engine.grid.data_parallel_id == dp - 1 else 4
        with pytest.raises(DataError) as error:
            engine.train_batch(batches(given))
        found.append(str(error.value))
        # The failed step leaves no trace in the gradients of the next one.
        losses = [[e.train_batch(batches(4, 4 * step)).item() for step in range(2)] for e in (engine, again)]
        assert losses[0] == losses[1]
    return found


@pytest.mark.parametrize(("world_size", "zero", "bf16"), [(2, 0, False), (4, 1, True)])
def test_an_iterator_that_ends_in_a_step_is_one_error_on_all_ranks(world_size, zero, bf16):
    for errors in run_ranks(_short_iterator, world_size, zero, bf16, timeout=90):
        for text in errors:
            assert "needs 4 micro-batches" in text
            assert "gave 3" in text


class FailsOnThird(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third call fails")
        return self.linear(x)


def _failing_layer(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    specs = [LayerSpec(TinyEmbedding, 7), LayerSpec(FailsOnThird), LayerSpec(TinyHead, 8)]
    engine = make_engine(specs, world_size, 6, scheduled("1f1b"))
    if rank == 1:
        with pytest.raises(ValueError, match="the third call fails"):
            engine.train_batch(batches(6))
    else:
        with pytest.raises(CommunicationError, match="rank 1 failed: ValueError: the third call fails"):
            engine.train_batch(batches(6))


def test_an_exception_in_a_layer_is_named_on_every_rank():
    run_ranks(_failing_layer, 3)


# -- what the host offers keeps working ----------------------------------------------------------------------


def _clipped_oracle(specs: list[Any], num_steps: int) -> list[float]:
    """Losses of one process that clips the norm of the whole model; the two copies of a tied layer are one."""
    layers = [spec.build() for spec in specs]
    if isinstance(specs[-1], TiedLayerSpec):
        layers[-1] = functools.partial(tied_logits, layers[0])
    parameters = [p for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()]
    losses = []
    for step in range(num_steps):
        losses.append(oracle_step(layers, token_loss, batches(4, 4 * step)).loss.item())
        nn.utils.clip_grad_norm_(parameters, 0.1)
        torch.optim.SGD(parameters, lr=0.5).step()
    return losses


def _clipping(rank: int, world_size: int) -> list[tuple[list[float], list[float]]]:
    deepspeed.init_distributed("gloo")
    found = []
    for specs, zero in itertools.product((gpt_layers(), tied_layers(4)), (0, 1)):
        block = scheduled("shifted_critical_path")
        more = {"gradient_clipping": 0.1, "zero_optimization": {"stage": zero}}
        engine = make_engine(specs, world_size, 4, block, **more)
        losses = [engine.train_batch(batches(4, 4 * step)).item() for step in range(4)]
        found.append((losses, _clipped_oracle(specs, 4)))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_clip_norm_is_that_of_the_whole_model(world_size):
    for found in run_ranks(_clipping, world_size, timeout=90):
        for losses, expected in found:
            assert losses == pytest.approx(expected, abs=2e-6)


def _host_features(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {}
    monitor = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/monitor", "job_name": "job"}}
    common = {"wall_clock_breakdown": True, "steps_per_print": 1, **monitor}
    engine = make_engine(gpt_layers(), world_size, 4, scheduled("shifted_critical_path"), **common)
    # Stock 0.19.8 cannot run with its timers on: its backward timers are started twice.
    stock = make_engine(gpt_layers(), world_size, 4, None)
    assert not ext.describe(stock)["active"]
    found["losses"] = [[e.train_batch(batches(4, 4 * s)).item() for s in range(3)] for e in (engine, stock)]

    # Checkpoints are the host's: ours loads in stock and stock's in ours.
    engine.save_checkpoint(f"{folder}/ours", tag="a")
    stock.save_checkpoint(f"{folder}/stock", tag="a")
    crossed = [
        make_engine(gpt_layers(), world_size, 4, None),
        make_engine(gpt_layers(), world_size, 4, scheduled("early_recompute")),
    ]
    crossed[0].load_checkpoint(f"{folder}/ours", tag="a")
    crossed[1].load_checkpoint(f"{folder}/stock", tag="a")
    found["resumed"] = [e.train_batch(batches(4, 99)).item() for e in (engine, *crossed)]
    return found


def test_monitor_timers_and_checkpoints(tmp_path):
    for found in run_ranks(_host_features, 2, str(tmp_path), timeout=120):
        ours, stock = found["losses"]
        assert ours == pytest.approx(stock, abs=1e-6)
        assert len(set(found["resumed"])) == 1
    assert list((tmp_path / "monitor" / "job").glob("*train_loss*"))


def _summary_lines(rank: int, world_size: int, folder: str) -> str:
    import io
    import os
    from contextlib import redirect_stderr

    os.environ["EXT_RUN_DIR"] = folder
    deepspeed.init_distributed("gloo")
    captured = io.StringIO()
    with redirect_stderr(captured):
        make_engine(gpt_layers(), world_size, 4, scheduled("shifted_critical_path")).train_batch(batches(4))
    return captured.getvalue()


def test_one_summary_line_and_the_resolved_config(tmp_path):
    texts = run_ranks(_summary_lines, 2, str(tmp_path))
    lines = [line for text in texts for line in text.splitlines() if line.startswith("megatron-deepspeed-ext")]
    assert len(lines) == 1
    assert "shifted_critical_path" in lines[0]
    resolved = json.loads(Path(tmp_path, "ext_resolved_config.json").read_text())
    assert resolved["plan"]["hash"] in lines[0]
    assert resolved["plan"]["recomputed_layers"] == [3, 0]


def _plain_module(rank: int, world_size: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "ext": scheduled("1f1b", "full")}
    ext.initialize(model=nn.Linear(2, 2), config=config)


def _too_few_microbatches(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    make_engine(gpt_layers(), world_size, 2, scheduled("shifted_critical_path"))


def _zero_2_and_typo(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    block = {"pipeline": {"schedul": "1f1b"}, "recompute": {"polcy": "full"}}
    make_engine(gpt_layers(), world_size, 4, block, zero_optimization={"stage": 2})


def _fewer_layers_than_stages(rank: int, world_size: int) -> None:
    deepspeed.init_distributed("gloo")
    make_engine(gpt_layers(0), world_size, 4, scheduled("1f1b"))


@pytest.mark.parametrize(
    ("fn", "world_size", "texts"),
    [
        (_plain_module, 2, ["ext.pipeline", "ext.recompute", "Linear", "PipelineModule"]),
        (_too_few_microbatches, 2, ["shifted_critical_path", "4", "2", "gradient_accumulation_steps", "1f1b"]),
        (_zero_2_and_typo, 2, ["schedul", "schedule", "polcy", "policy"]),
        (_fewer_layers_than_stages, 3, ["layers", "stages"]),
    ],
)
def test_what_cannot_work_is_one_error_on_all_ranks(fn, world_size, texts):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(fn, world_size)
    errors = failed.value.errors
    assert sorted(errors) == list(range(world_size))
    assert len({str(error) for error in errors.values()}) == 1
    assert all(type(error).__name__ == "ConfigError" for error in errors.values())
    for text in texts:
        assert text in str(errors[0])
