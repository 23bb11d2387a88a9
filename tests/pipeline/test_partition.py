"""Layers on stages: every layout holds each layer once, and the recompute-aware one is the best there is."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ext.core.errors import ConfigError, InfeasibleError
from ext.cost.profile import LayerProfile
from ext.cost.states import StateBytes
from ext.pipeline.build import build_plan
from ext.pipeline.memory_table import predict
from ext.pipeline.partition import listed_bounds, recompute_aware, uniform_bounds
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.stage_model import PipelineProfile, Stage

GPT = ["Embedding", "Positions", *["Block"] * 24, "Norm", "Embedding"]


def _counts(bounds):
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _blocks(bounds, names):
    return [names[start:stop].count("Block") for start, stop in itertools.pairwise(bounds)]


@given(st.integers(1, 60), st.integers(1, 16), st.integers(0, 3), st.integers(0, 3))
def test_uniform_holds_every_layer_once(num_blocks, num_stages, before, behind):
    names = [*["Other"] * min(before, num_blocks - 1), *["Block"] * num_blocks, *["Tail"] * min(behind, num_blocks - 1)]
    if len(names) < num_stages:
        with pytest.raises(ConfigError, match=f"{len(names)} layers cannot fill {num_stages} pipeline stages"):
            uniform_bounds(names, num_stages)
        return
    bounds = uniform_bounds(names, num_stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(names)
    assert all(count >= 1 for count in _counts(bounds))
    assert sum(_counts(bounds)) == len(names)
    if num_blocks >= num_stages:
        blocks = _blocks(bounds, names)
        assert sum(blocks) == num_blocks
        assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "blocks"),
    [(30, 4, [8, 8, 7, 7]), (20, 8, [3, 3, 3, 3, 2, 2, 2, 2]), (24, 4, [6, 6, 6, 6])],
)
def test_layers_that_do_not_divide_are_not_lost(num_blocks, num_stages, blocks):
    names = ["Embedding", *["Block"] * num_blocks, "Head"]
    bounds = uniform_bounds(names, num_stages)
    assert _blocks(bounds, names) == blocks
    assert bounds[1] == 1 + blocks[0]


def test_a_list_counts_layers_or_blocks():
    assert listed_bounds([8, 6, 6, 8], GPT) == (0, 8, 14, 20, 28)
    assert listed_bounds([6, 6, 6, 6], GPT) == (0, 8, 14, 20, 28)
    assert listed_bounds([9, 5, 5, 5], GPT) == (0, 11, 16, 21, 28)
    with pytest.raises(ConfigError, match="6 \\+ 6 \\+ 6 = 18 layers, the model has 28 layers and 24 blocks 'Block'"):
        listed_bounds([6, 6, 6], GPT)
    with pytest.raises(ConfigError, match="Make the sum 3\\."):
        listed_bounds([1, 1], ["A", "B", "C"])


def _layer(rng, *, like=None):
    if like is not None:
        return like
    size = rng.randint(1, 9)
    return LayerProfile(
        name="Block",
        forward=rng.choice([1.0, 1.5]),
        recompute=rng.choice([0.5, 1.0, 3.0]),
        input_grad=1.0,
        weight_grad=rng.choice([0.5, 1.0]),
        storages=(2, 10 * size, 2),
        inputs=(0,),
        outputs=(2,),
        saved=(0, 1),
        transient=size,
        trained=rng.randint(1, 20),
        recomputable=rng.random() < 0.8,
    )


LOSS = LayerProfile("loss", 0.5, 0.5, 0.5, 0.0, (2, 30, 1), (0,), (2,), (1,), recomputable=False)
STATES = StateBytes(parameter=1, gradient=1, optimizer=2)


def _stages(layers, bounds):
    parts = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
    last = len(parts) - 1
    return tuple(Stage([*part, LOSS] if i == last else part, is_last=i == last) for i, part in enumerate(parts))


def _times(stages, counts):
    costs = [stage.costs(count) for stage, count in zip(stages, counts, strict=True)]
    return [c.forward + c.input_grad + c.weight_grad + c.recompute for c in costs]


def _fits(schedule, layers, bounds, counts, budgets):
    """Whether the whole plan keeps within the budgets."""
    profile = PipelineProfile(_stages(layers, bounds), STATES, 2)
    plan = build_plan(schedule, layers_per_stage=_counts(bounds), recomputed_layers=counts)
    return not any(row.exceeds for row in predict(plan, profile, budgets))


def _brute_force(schedule, layers, budgets):
    """Smallest (bottleneck, time of all stages) over all layouts and numbers of recomputed layers that fit."""
    p, best = len(budgets), (math.inf, math.inf)
    for cuts in itertools.combinations(range(1, len(layers)), p - 1):
        bounds = (0, *cuts, len(layers))
        stages = _stages(layers, bounds)
        options = [range(len(s.recomputable) + 1 if schedule.may_recompute(i) else 1) for i, s in enumerate(stages)]
        for counts in itertools.product(*options):
            times = _times(stages, counts)
            if (max(times), sum(times)) < best and _fits(schedule, layers, bounds, counts, budgets):
                best = max(times), sum(times)
    return best


@pytest.mark.parametrize("seed", range(80))
def test_recompute_aware_finds_the_smallest_bottleneck(seed):
    rng = random.Random(seed)
    p = rng.choice([1, 2, 3])
    name = rng.choice(["1f1b", "early_recompute", "last_no_recompute", "gpipe"])
    block = _layer(rng)
    layers = [_layer(rng, like=None if seed % 4 else block) for _ in range(rng.randint(max(p, 3), 6))]
    schedule = SCHEDULES.get(name)(shape=PipelineShape(p, 5))
    budgets = [rng.uniform(60, 400) for _ in range(p)]
    expected = _brute_force(schedule, layers, budgets)
    if expected[0] == math.inf:
        with pytest.raises(InfeasibleError, match="no layout of"):
            recompute_aware(schedule, layers, LOSS, STATES, budgets, max_unfinished_sends=2)
        return
    layout = recompute_aware(schedule, layers, LOSS, STATES, budgets, max_unfinished_sends=2)
    times = _times(_stages(layers, layout.bounds), layout.recomputed_layers)
    assert (max(times), sum(times)) == pytest.approx(expected)
    assert layout.bottleneck == pytest.approx(expected[0])
    assert _fits(schedule, layers, layout.bounds, layout.recomputed_layers, budgets)
    assert layout.bounds[0] == 0
    assert layout.bounds[-1] == len(layers)
    assert min(_counts(layout.bounds)) >= 1


def test_layers_move_to_where_memory_is():
    """Equal stages of 1f1b do not fit this budget, because the first holds most micro-batches; uneven ones do."""
    layer = LayerProfile("Block", 1, 1, 1, 1, (1, 100, 1), (0,), (2,), (0, 1), recomputable=False)
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(4, 16))
    budgets = [1020.0] * 4
    layout = recompute_aware(schedule, [layer] * 12, None, StateBytes(0, 0, 0), budgets)
    counts = _counts(layout.bounds)
    assert sum(counts) == 12
    assert counts[0] < counts[3]
    equal = PipelineProfile(tuple(Stage([layer] * 3, is_last=i == 3) for i in range(4)), StateBytes(0, 0, 0))
    plan = build_plan(schedule, layers_per_stage=[3] * 4, recomputed_layers=[0] * 4)
    assert predict(plan, equal, budgets)[0].exceeds


def test_only_allowed_numbers_are_recomputed():
    rng = random.Random(3)
    layers = [_layer(rng) for _ in range(6)]
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(2, 4))
    full = recompute_aware(schedule, layers, LOSS, STATES, [1e9] * 2, allowed=lambda stage, most: [most])
    none = recompute_aware(schedule, layers, LOSS, STATES, [1e9] * 2, allowed=lambda stage, most: [0])
    assert sum(full.recomputed_layers) == sum(layer.recomputable for layer in layers)
    assert sum(none.recomputed_layers) == 0
    assert none.bottleneck < full.bottleneck


def test_fewer_layers_than_stages():
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(4, 4))
    with pytest.raises(ConfigError, match="3 layers cannot fill 4 pipeline stages"):
        recompute_aware(schedule, [_layer(random.Random(1))] * 3, None, STATES, [1e9] * 4)
