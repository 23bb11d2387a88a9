"""MoE layers inside a PipelineModule, from the config alone: pipeline x experts x replicas against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ext.testing.ranks import run_ranks

HIDDEN, EXPERTS, SEQ, MICRO, GAS = 8, 4, 6, 2, 4
AUX = 0.1


class MoEBlock(nn.Module):
    """Residual MoE with dropout-free experts; passes the auxiliary losses on in a tuple, or drops its own."""

    def __init__(self, seed: int, ep_size: int, carries_aux: bool = True, **options) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        options = {"k": 2, "capacity_factor": 0.8, "min_capacity": 1, "top2_2nd_expert_sampling": False, **options}
        self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, ep_size, **options)
        gate, experts = self.moe.deepspeed_moe.gate, self.moe.deepspeed_moe.experts.deepspeed_experts
        gate.wg.weight.data = torch.randn(EXPERTS, HIDDEN, generator=generator)
        weights = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)
        first = (dist.get_rank() % ep_size if ep_size > 1 else 0) * len(experts)
        for i, expert in enumerate(experts):
            expert.weight.data = weights[first + i].clone()
            expert.bias.data.zero_()
        self.carries_aux = carries_aux

    def forward(self, inputs):
        x, aux = inputs if self.carries_aux else (inputs, None)
        y, l_aux, _ = self.moe(x)
        return (x + y, aux + l_aux) if self.carries_aux else x + y


class First(nn.Module):
    """A linear layer, and an auxiliary loss of zero to carry on."""

    def __init__(self, carries_aux: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.carries_aux = carries_aux

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return (y, y.sum() * 0) if self.carries_aux else y


class Last(nn.Module):
    """A linear layer on the first of a tuple."""

    def __init__(self, carries_aux: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(HIDDEN, 1)
        self.carries_aux = carries_aux

    def forward(self, inputs):
        x, aux = inputs if self.carries_aux else (inputs, None)
        return (self.linear(x), aux) if self.carries_aux else self.linear(x)


def _loss(outputs, label):
    y, aux = outputs if isinstance(outputs, tuple) else (outputs, 0.0)
    return (y - label).square().mean() + AUX * aux


def _batches(replica: int, step: int):
    generator = torch.Generator().manual_seed(1000 * replica + step)
    return [
        (torch.randn(MICRO, SEQ, HIDDEN, generator=generator), torch.randn(MICRO, SEQ, 1, generator=generator))
        for _ in range(GAS)
    ]


def _layers(ep_size: int, carries_aux: bool, **options):
    from deepspeed.pipe import LayerSpec

    num_blocks = options.pop("num_blocks", 3)
    blocks = [LayerSpec(MoEBlock, 10 + i, ep_size, carries_aux, **options) for i in range(num_blocks)]
    return [LayerSpec(First, carries_aux), *blocks, LayerSpec(Last, carries_aux)]


def _reset_groups() -> None:
    from deepspeed.utils import groups

    for known in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    ):
        known.clear()
    groups.mpu = None


def _engine(schedule: str, ep_size: int, zero: int = 0, clip: float = 0.0, carries_aux: bool = True, **ext_config):
    from deepspeed.pipe import PipelineModule

    import ext

    _reset_groups()
    options, precision = ext_config.pop("layer", {}), ext_config.pop("bf16", {"enabled": False})
    module = PipelineModule(
        layers=_layers(ep_size, carries_aux, **options),
        num_stages=2,
        loss_fn=_loss,
        partition_method="uniform",
        activation_checkpoint_interval=ext_config.pop("host_interval", 0),
    )
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": ext_config.pop("momentum", 0.0)}},
        "bf16": precision,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clip,
        "ext": {"pipeline": {"schedule": schedule}, "moe": {}, **ext_config},
    }
    engine, *_ = ext.initialize(model=module, config=config)
    return engine


def _oracle(**options):
    """Loss and gradients by one process, and their norm: the mean over replicas and micro-batches."""
    from ext.adapters.deepspeed import moe
    from ext.comm.topology import RankGroup
    from ext.moe.dispatcher import DISPATCHERS

    model = nn.ModuleList([spec.build() for spec in _layers(1, True, **options)])
    moe.convert(model)
    for module in model.modules():
        if isinstance(module, moe.DispatchMOELayer):
            module.dispatcher = DISPATCHERS.get("linear")().build(RankGroup.alone(), EXPERTS)
    total = torch.zeros(())
    for replica in range(2):
        for x, label in _batches(replica, 0):
            for layer in model:
                x = layer(x)
            loss = _loss(x, label) / GAS / 2
            loss.backward()
            total += loss.detach()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return float(total), grads, float(torch.cat([g.flatten() for g in grads.values()]).norm())


def _step(engine) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and the change of every parameter of this rank, by its name in the whole model."""
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    dtype = next(engine.module.parameters()).dtype
    batches = [(x.to(dtype), label.to(dtype)) for x, label in _batches(engine.grid.get_data_parallel_rank(), 0)]
    loss = engine.train_batch(iter(batches))
    changes = {}
    for name, parameter in engine.module.named_parameters():
        change = before[name] - parameter.detach()
        prefix, _, rest = name.partition("deepspeed_experts.")
        if rest:
            local, _, rest = rest.partition(".")
            layer = engine.module.get_submodule(prefix.partition(".deepspeed_moe")[0])
            first = dist.get_rank() % layer.ep_size * layer.num_local_experts
            name = f"{prefix}deepspeed_experts.{first + int(local)}.{rest}"
        changes[name] = change
    return float(loss), changes


FULL = {"recompute": {"policy": "full"}}
DROPLESS = {"k": 1, "drop_tokens": False}
UNEVEN = {"num_blocks": 1}  # the last stage has no MoE layer
MOST = [
    ({}, "1f1b", 2, 0, True, {}),
    ({}, "shifted_critical_path", 2, 1, True, FULL),
    ({}, "zb_h1", 2, 0, True, {}),
    (DROPLESS, "1f1b", 1, 1, False, FULL),
    (UNEVEN, "shifted_critical_path", 2, 1, True, FULL),
]
OTHERS = [
    ({}, "gpipe", 2, 0, False, {"host_interval": 1}),
    ({}, "1f1b", 1, 1, False, FULL),
    (DROPLESS, "shifted_critical_path", 2, 1, True, FULL),
    (UNEVEN, "1f1b", 2, 0, True, {}),
]


def _cases(rank: int, world_size: int, cases: list) -> int:
    import deepspeed

    from ext.adapters.deepspeed import moe, moe_gate
    from ext.moe.agreement import agree

    deepspeed.init_distributed("gloo", verbose=False)
    agreements = []
    moe_gate.agree = lambda *args: agreements.append(args) or agree(*args)
    compared = 0
    for options, schedule, ep_size, zero, carries_aux, blocks in cases:
        loss, grads, norm = _oracle(**options)
        where = f"{options} {schedule} ep {ep_size} zero {zero} {carries_aux}"
        if not carries_aux:
            blocks = {**blocks, "moe": {"router": {"aux_loss_weight": AUX}}}
        engine = _engine(schedule, ep_size, zero, clip=norm / 4, carries_aux=carries_aux, layer=options, **blocks)
        agreements.clear()
        found, changes = _step(engine)
        if carries_aux:
            assert found == pytest.approx(loss, rel=1e-5), where
        for name, change in changes.items():
            torch.testing.assert_close(
                4 * change, grads[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name, w=where: f"{w} {n}: {m}"
            )
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-5), where
        layers = moe.layers_of(engine)
        # A re-run must not route again, nor be counted; nor where DeepSpeed's own checkpointing makes it.
        assert len(agreements) == GAS * len(layers), where
        assert [layer.router.statistics.num_calls for layer in layers] == [GAS] * len(layers), where
        compared += len(changes)
    return compared


def _checkpoints_and_bf16(rank: int, world_size: int, folder: str) -> dict:
    """Checkpoints of a pipeline at another ep_size, with and without a stage without experts; norms of bf16."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    # Clipped, since steps at this learning rate would grow without end otherwise.
    for zero, layer in ((0, {}), (1, UNEVEN)):
        engine = _engine("1f1b", 2, zero, clip=0.5, layer=layer, momentum=0.9)
        _step(engine)
        engine.save_checkpoint(f"{folder}/{zero}")
        _, expected = _step(engine)
        engine = _engine("1f1b", 1, zero, clip=0.5, layer=layer, momentum=0.9)
        _step(engine)
        engine.load_checkpoint(f"{folder}/{zero}")
        _, found = _step(engine)
        for name, change in expected.items():
            torch.testing.assert_close(
                found[name], change, rtol=1e-5, atol=1e-6, msg=lambda m, n=name, z=zero: f"zero {z} {n}: {m}"
            )
    norms = {}
    for ep_size, layer in ((1, {}), (2, {}), (2, UNEVEN)):
        engine = _engine("1f1b", ep_size, clip=0.1, layer=layer, bf16={"enabled": True})
        _step(engine)
        norms[ep_size, len(layer)] = float(engine.get_global_grad_norm())
    return norms


@pytest.mark.dist
def test_gradients_in_a_pipeline():
    assert min(run_ranks(_cases, 4, MOST)) > 0


@pytest.mark.dist
@pytest.mark.slow
def test_more_gradients_in_a_pipeline():
    assert min(run_ranks(_cases, 4, OTHERS)) > 0


@pytest.mark.dist
@pytest.mark.slow
def test_checkpoints_of_a_pipeline(tmp_path):
    for norms in run_ranks(_checkpoints_and_bf16, 4, str(tmp_path), timeout=120):
        assert norms[1, 0] == pytest.approx(norms[2, 0], rel=1e-2)
        assert norms[2, 1] > 0
