"""The example GPT with layers shared over ranks against one process, under schedules, recomputation and checkpoints."""

import json
import random
from dataclasses import replace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ext
from ext.comm.tensor_parallel.group import TensorParallelGroup
from ext.core.errors import ConfigError
from ext.recompute import profile
from ext.recompute.table import UnitTable
from ext.recompute.units import AllReduces
from ext.testing.oracle import oracle_step
from ext.testing.ranks import run_ranks
from gpt import arguments, check, device, model, tensor_parallel

pytestmark = pytest.mark.dist

VOCAB, SEQUENCE, GAS = 61, 8, 4  # an odd vocabulary: the last rank has a row more than it has tokens
CLIP = 0.05
SLACK = 2048  # bytes by which two profiles may differ: threads of collectives let go of tensors when they like
SCHEDULES = ("1f1b", "early_recompute", "shifted_critical_path", "zb_h1")
UNITS = ("norm1", "qkv", "mix", "residual", "norm2", "fc1", "gelu", "out")
DECISIONS = ("keep", "unused", "C", "P", "F1", "F2", "B1", "B2")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def _gpt(dropout=0.0):
    return model.GPTConfig(VOCAB, num_layers=2, hidden_size=16, num_heads=4, sequence_length=SEQUENCE, dropout=dropout)


def _batches(count):
    generator = torch.Generator().manual_seed(11)
    draws = [torch.randint(VOCAB, (2, SEQUENCE + 1), generator=generator) for _ in range(count)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in draws]


def _engine(
    num_stages,
    shared_by=2,
    dropout=0.0,
    schedule="1f1b",
    recompute="none",
    clip=0.0,
    zero=0,
    dtype=None,
    parts=1,
    budget=None,
    partition="module",
):
    batches = _batches(1)
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ext": {
            "pipeline": {"schedule": schedule, "partition": partition},
            "recompute": {"policy": recompute},
            "tensor_parallel": {"sub_pipeline": parts},
        },
    }
    if budget is not None:
        ds_config["ext"]["recompute"]["memory_budget_gib"] = budget
    module = tensor_parallel.build(_gpt(dropout), num_stages, shared_by, 5, ds_config, batches[0])
    module.to(dtype or torch.float32)
    tensor_parallel.seed_dropout(3, shared_by)
    return ext.initialize(model=module, model_parameters=list(module.parameters()), config=ds_config)[0]


def _weights(engine):
    """By layer and name; a tied layer is the first one."""
    module, found = engine.module, {}
    for position, layer in enumerate(module.forward_funcs):
        index = position + module._local_start
        is_layer = isinstance(layer, torch.nn.Module)
        owner = layer if is_layer else module.tied_modules["embedding"]
        for name, parameter in owner.named_parameters():
            found[index if is_layer and not isinstance(layer, tensor_parallel.SharedEmbedding) else 0, name] = parameter
    return found


def _step(engine):
    """Loss of one training step and what it took from the weights: with SGD and rate 1 the gradient."""
    replicas = engine.dp_world_size
    batches = _batches(GAS * replicas)[engine.grid.get_data_parallel_rank() * GAS :][:GAS]
    before = {key: weight.detach().clone() for key, weight in _weights(engine).items()}
    loss = engine.train_batch(iter(batches))
    return loss.detach(), {key: before[key] - weight.detach() for key, weight in _weights(engine).items()}


def _whole(dtype, replicas):
    """Loss and gradients of the whole model in one process."""
    modules, tied = [], {}
    for index, spec in enumerate(model.layers(_gpt())):
        model._seed_layer(5 + index)
        key = getattr(spec, "key", None)
        if key not in tied or key is None:
            modules.append(spec.build().to(dtype))
            tied[key] = modules[-1]
        else:
            modules.append(lambda hidden, spec=spec, shared=tied[key]: spec.forward_fn(shared, hidden))

    def loss_fn(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return oracle_step(modules, loss_fn, _batches(GAS * replicas))


_NAMES = {"mlp.0.": ("fc1", 0, 1), "mlp.2.weight": ("fc2", 1, 1), "attention.qkv.": ("qkv", 0, 3)}


def _part(name, gradient, group):
    """This rank's part of a whole gradient."""
    if name == "attention.out.weight":
        return group.shard(gradient, 1)
    for prefix, (_, dim, blocks) in _NAMES.items():
        if name.startswith(prefix):
            return group.shard(gradient, dim, blocks)
    if gradient.shape[0] == VOCAB:
        return tensor_parallel.VocabParallelEmbedding(gradient, group).weight.detach()
    return gradient


def _gradients_of(engine):
    """Loss and gradients of one training step, averaged over replicas here: the host rounds them to fp32."""
    found, reduce = {}, engine.allreduce_gradients

    def noted(*args, **kwargs):
        for key, weight in _weights(engine).items():
            found[key] = weight.grad.clone()
            dist.all_reduce(found[key], group=engine.grid.get_data_parallel_group())
            found[key] /= engine.dp_world_size
        return reduce(*args, **kwargs)

    engine.allreduce_gradients = noted
    return _step(engine)[0], found


def against_whole(engine, dtype):
    loss, gradients = _gradients_of(engine)
    grid = engine.grid
    group = TensorParallelGroup(None, grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size())
    whole = _whole(dtype, engine.dp_world_size)
    assert (loss - whole.loss).abs().item() < 1e-6  # the host adds up losses in fp32
    errors = []
    for (index, name), gradient in gradients.items():
        expected = _part(name, whole.gradients[index][name], group)
        assert gradient.shape == expected.shape, name
        errors.append((gradient - expected).norm().item() / expected.norm().item())
    squares = {id(g): g.double().square().sum() for layer in whole.gradients for g in layer.values()}
    return max(errors), sum(squares.values()).sqrt().item()


def clipped(num_stages, zero, norm):
    """How much the update of a clipped step is longer than it should be."""
    plain, engine = _engine(num_stages, zero=zero), _engine(num_stages, zero=zero, clip=CLIP)
    (_, gradients), (_, updates) = _step(plain), _step(engine)
    key = max(gradients, key=lambda key: gradients[key].norm())
    return (updates[key].norm() / gradients[key].norm()).item() * norm / CLIP - 1


def dropout_differs(num_stages):
    """Schedules and policies that do not give bit for bit the step of plain 1f1b, and those that did not recompute."""
    reference, found = None, []
    for schedule in SCHEDULES:
        for policy in ("none", "full"):
            engine = _engine(num_stages, dropout=0.3, schedule=schedule, recompute=policy)
            loss, gradients = _step(engine)
            reference = reference or (loss, gradients)
            same = torch.equal(loss, reference[0])
            same &= all(torch.equal(gradient, reference[1][key]) for key, gradient in gradients.items())
            reruns = sum(engine.recomputes.values())
            keeps_all = policy == "none" or schedule == "shifted_critical_path" and engine.is_last_stage()
            if not same or (reruns == 0) != keeps_all:
                found.append((schedule, policy, same, reruns))
    return found


def units_differ(num_stages):
    """Unit policies that do not give bit for bit the step of none, and the windows that were used by stage."""
    plain = _engine(num_stages, dropout=0.3, recompute={"type": "none"}, budget=1.0)
    reference, found, used = _step(plain), [], set()
    last = 0.15 if num_stages == 1 else 0.0  # a stage with one micro-batch in flight has little to give
    rows = ext.memory_report(plain)
    shares = [0.3 if row.in_flight > 1 else last for row in rows]
    budget = [(row.total - share * row.activations + SLACK) / 2**30 for row, share in zip(rows, shares, strict=True)]
    # On a link so slow that every recompute fits under an all-reduce.
    profile._AllReduceProbe.all_reduces = lambda self: AllReduces(1.0, 1.0, 1.0, 1.0) if self._forward else None
    for policy in ("lynx_heu", "lynx_opt", 1, 2, 3):
        drawn = isinstance(policy, int)
        engine = _engine(num_stages, dropout=0.3, recompute="lynx_heu" if drawn else policy, budget=budget)
        if drawn:
            _draw_tables(engine, random.Random(policy))  # the same on all ranks that share a layer
        loss, gradients = _step(engine)
        windows = {name: use.units for name, use in engine._units.report.windows.items()}
        same = torch.equal(loss, reference[0])
        same &= all(torch.equal(gradient, reference[1][key]) for key, gradient in gradients.items())
        if not same:
            found.append((policy, same, windows))
        used |= windows.keys()
    return found, used


def _draw_tables(engine, draw):
    """Tables that no solver made: they may cost time and memory, and change no bit."""
    engine.memory.decide_from(_batches(1)[0])
    engine.memory._was_counted = True  # they need not keep the budget
    units = engine._units
    tables = [UnitTable.of({name: draw.choice(DECISIONS) for name in UNITS}) for _ in units.tables.tables]
    units.tables = replace(units.tables, tables=tuple(tables))


def saved_and_loaded(num_stages, folder):
    """The weights of a trained engine in a fresh one, from files by layer and rank; and the streams of dropout."""
    trained = _engine(num_stages, dropout=0.3)
    _step(trained)
    trained.save_checkpoint(folder, tag="t")
    streams = device.random_state()
    expected = _step(trained)
    fresh = _engine(num_stages, dropout=0.3)
    fresh.load_checkpoint(folder, tag="t")
    device.restore_random_state(streams)
    found = _step(fresh)
    same = torch.equal(expected[0], found[0])
    return same and all(torch.equal(found[1][key], gradient) for key, gradient in expected[1].items())


def replicated_alike(engine):
    """Weights that every rank of a group has whole are the same there, after a step with dropout."""
    _step(engine)
    for _, weight in sorted(_weights(engine).items(), key=lambda item: str(item[0])):
        if not getattr(weight, "tensor_model_parallel", False) and not getattr(weight, "ds_pipe_replicated", False):
            parts = [torch.empty_like(weight) for _ in range(engine.grid.get_slice_parallel_world_size())]
            dist.all_gather(parts, weight.detach(), group=engine.grid.get_slice_parallel_group())
            if not all(torch.equal(part, parts[0]) for part in parts):
                return False
    return True


def evaluated(engine):
    loss = engine.eval_batch(iter(_batches(GAS)), num_micro_batches=GAS)
    return (loss - _whole(torch.float32, 1).loss).abs().item()


def run_cases(rank, world_size, num_stages, folder):
    deepspeed.init_distributed("gloo")
    accelerator = type(get_accelerator())
    accelerator.supported_dtypes = lambda self: [torch.float32, torch.float64]  # the host's sum over replicas asks
    found = {}
    for dtype in (torch.float64, torch.float32):
        found[str(dtype)], norm = against_whole(_engine(num_stages, dtype=dtype), dtype)
    engines = [_engine(num_stages, dtype=torch.float64, parts=2, schedule=schedule) for schedule in ("1f1b", "zb_h1")]
    found["in parts"] = max(against_whole(engine, torch.float64)[0] for engine in engines)
    plain, parts = (_step(_engine(num_stages, zero=1, parts=parts)) for parts in (1, 2))
    found["in parts, zero 1"] = max((plain[1][key] - parts[1][key]).abs().max().item() for key in plain[1])
    found["clip"] = max(abs(clipped(num_stages, zero, norm)) for zero in (0, 1))
    found["eval"] = evaluated(_engine(num_stages))
    found["dropout"] = dropout_differs(num_stages)
    found["units"], found["windows"] = units_differ(num_stages)
    found["loaded"] = saved_and_loaded(num_stages, folder)
    found["replicated"] = replicated_alike(_engine(num_stages, dropout=0.3))
    return found


@pytest.mark.parametrize(
    ("world_size", "num_stages"),
    [(4, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_shared_over_ranks_it_is_the_same_model(world_size, num_stages, tmp_path):
    results = run_ranks(run_cases, world_size, num_stages, str(tmp_path), timeout=120)
    # Whether an all-reduce leaves room for any of it is a matter of measured times; tests/recompute holds the windows.
    assert set().union(*(found["windows"] for found in results))
    for found in results:
        assert found["torch.float64"] < TOLERANCE[torch.float64]
        assert found["torch.float32"] < TOLERANCE[torch.float32]
        assert found["in parts"] < TOLERANCE[torch.float64]
        assert found["in parts, zero 1"] < TOLERANCE[torch.float32]
        assert found["clip"] < 1e-4
        assert found["eval"] < 1e-5
        assert found["dropout"] == []
        assert found["units"] == []
        assert found["loaded"]
        assert found["replicated"]
    names = {path.name for path in (tmp_path / "t").glob("layer_*")}
    assert {f"layer_02-model_{rank:02d}-model_states.pt" for rank in (0, 1)} <= names


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--world-size", "3"], "3 ranks cannot be cut"),
        (["--world-size", "4", "--num-heads", "1"], "2 ranks cannot share 1 attention heads"),
        (["--world-size", "4", "--num-experts", "4"], "shares no layers with experts"),
    ],
)
def test_what_cannot_be_shared_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        check.check(arguments.parse(["--check", "--tensor-parallel", "2", "--pipeline-stages", "2", *options]))


@pytest.mark.parametrize("partition", ["recompute_aware", "auto"])
def test_layers_are_not_measured_on_one_rank_alone(tmp_path, partition):
    with pytest.raises(ConfigError, match=f"{partition}.*--tensor-parallel"):
        _problems(tmp_path, {"pipeline": {"partition": partition}})


def _problems(tmp_path, block, **batch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, **batch, "ext": block}))
    options = ["--check", "--pipeline-stages", "2", "--tensor-parallel", "2", "--world-size", "4", "--config"]
    check.check(arguments.parse([*options, str(config)]))


def test_what_cannot_be_cut_in_parts_is_refused(tmp_path):
    key, parts = "ext.tensor_parallel.sub_pipeline: 2 ", {"tensor_parallel": {"sub_pipeline": 2}}
    _problems(tmp_path, {**parts, "recompute": {"policy": "none"}})
    _problems(tmp_path, parts)  # 1f1b recomputes nothing by itself
    with pytest.raises(ConfigError, match=key + "keeps all .*ext.recompute.policy is 'full'"):
        _problems(tmp_path, {**parts, "recompute": {"policy": "full"}})
    with pytest.raises(ConfigError, match=key + "keeps all .*'early_recompute' recomputes them unless told otherwise"):
        _problems(tmp_path, {**parts, "pipeline": {"schedule": "early_recompute"}})
    with pytest.raises(ConfigError, match=key + "cuts a micro-batch in two"):
        _problems(tmp_path, parts, train_micro_batch_size_per_gpu=1)


def refused(rank, world_size):
    deepspeed.init_distributed("gloo")
    texts = []
    for shared_by in (1, 2):
        with pytest.raises(ConfigError) as caught:
            _engine(1, shared_by, recompute="full" if shared_by == 2 else "none", parts=2)
        texts.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        _engine(1, partition="auto")
    texts.append(str(caught.value))
    block = {"tensor_parallel": {"sub_pipeline": 2}}
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        ext.initialize(model=linear, config={"train_micro_batch_size_per_gpu": 2, "ext": block})
    return [*texts, str(caught.value)]


def test_parts_of_what_is_not_shared_are_refused_on_all_ranks_alike():
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "no rank shares one" in first[0]
    assert "policy is 'full'" in first[1]
    assert "ext.pipeline.partition: 'auto' measures the layers on one rank" in first[2]
    assert "ext.tensor_parallel: needs a pipeline model, found Linear" in first[3]
