"""The table of memory per stage shows what every stage holds, and which one is the heaviest."""

from dataclasses import replace

import pytest

from ext.cost.gpt import gpt_profile
from ext.cost.hardware import DEVICES
from ext.cost.states import MIXED_ADAM
from ext.cost.transformer import TransformerShape
from ext.pipeline.build import build_plan
from ext.pipeline.memory_table import GIB, amount, heaviest, predict, table
from ext.pipeline.partition import uniform_bounds
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.stage_model import PipelineProfile, Stage

SHAPE = TransformerShape(hidden_size=1024, num_heads=16, num_layers=24, seq_length=1024, vocab_size=50304)


@pytest.fixture
def rows():
    layers = gpt_profile(SHAPE, 1, DEVICES["a100-40gb"])
    bounds = uniform_bounds([layer.name for layer in layers], 4)
    stages = [layers[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
    profile = PipelineProfile(
        tuple(Stage(stage, is_last=index == 3) for index, stage in enumerate(stages)), MIXED_ADAM, 8
    )
    schedule = SCHEDULES.get("1f1b")(shape=PipelineShape(4, 8))
    plan = build_plan(schedule, layers_per_stage=[len(stage) for stage in stages], recomputed_layers=[2, 1, 0, 0])
    return predict(plan, profile, budgets=[6 * GIB] * 4)


def test_states_of_every_stage_with_an_embedding_at_both_ends(rows):
    assert [row.states.parameters // 2 for row in rows] == [128_137_216, 75_577_344, 75_577_344, 127_090_688]
    assert [round(row.states.total / GIB, 3) for row in rows] == [2.148, 1.267, 1.267, 2.131]


def test_the_heaviest_stage_is_marked(rows):
    """By states alone it is the first; logits and their gradients make it the last."""
    assert max(rows, key=lambda row: row.states.total).stage == 0
    assert heaviest(rows).stage == 3
    lines = table(rows).splitlines()
    assert lines[0] == "memory per stage in GiB"
    assert [line.endswith("<- heaviest") for line in lines[2:]] == [False, False, False, True]
    titles = "stage layers recomputed in flight parameters gradients optimizer activations (loss) live passing"
    assert " ".join(lines[1].split()) == f"{titles} messages total budget"
    assert lines[2].split()[:3] == ["0", "7", "2"]
    assert lines[2].split()[-2] == f"{rows[0].total / GIB:.3f}"


def test_activations_follow_the_order(rows):
    """Stage 2 holds two micro-batches of six whole layers, 34 s b h bytes each, and its own input and output."""
    layer = 34 * 1024 * 1024
    vector = 2 * 1024 * 1024
    assert [row.in_flight for row in rows] == [4, 3, 2, 1]
    assert rows[2].activations == 2 * (6 * layer + 2 * vector)
    recomputed = 3 * (5 * layer + vector + 2 * vector)
    # The backward has freed five layers before it brings the first one back.
    assert rows[1].activations == recomputed
    assert rows[3].loss == 2 * vector + 4 * 50304 * 1024


def test_measured_decides_once_it_is_there(rows):
    from dataclasses import replace

    rows = [replace(row, measured=row.live + (10 * GIB if row.stage == 2 else 0)) for row in rows]
    assert heaviest(rows).stage == 2
    assert table(rows).splitlines()[4].endswith("<- heaviest")
    assert " measured" in table(rows)


def test_amounts_read_well():
    assert amount(1.5 * GIB) == "1.500 GiB"
    assert amount(3 * 2**20) == "3.000 MiB"
    assert amount(512) == "0.500 KiB"


@pytest.mark.parametrize("name", ["zb_h1", "1f1b"])
def test_gradients_that_w_adds_to_others_are_there_only_in_w(name):
    """One block per stage on two stages of two ranks: what W holds is counted with what waits, where no B keeps it."""
    block = gpt_profile(SHAPE, 1, DEVICES["a100-40gb"])[1]
    stages = tuple(Stage([block], is_last=last) for last in (False, True))
    schedule = SCHEDULES.get(name)(shape=PipelineShape(2, 4))
    plan = build_plan(schedule, layers_per_stage=[1, 1], recomputed_layers=[0, 0])
    found = {
        passing: predict(plan, PipelineProfile(stages, replace(MIXED_ADAM, passing=passing)))[0]
        for passing in (0, 2, 4)
    }
    if name == "1f1b":
        assert found[0] == found[2] == found[4]
        return
    numbers, vector = block.trained, 2 * 1024 * 1024
    waiting, whole = block.deferral.bytes, 34 * 1024 * 1024 + 2 * vector
    assert found[0].activations == 2 * whole + block.deferral.growth
    assert whole + waiting < found[0].activations
    for passing in (2, 4):
        assert found[passing].states.gradients == (4 - passing) * numbers
        in_w = whole + waiting + passing * numbers
        assert found[passing].activations == max(found[0].activations, in_w)
    assert found[4].activations > found[0].activations


def test_the_loss_of_micro_batches_that_wait_for_w_is_what_w_needs_of_it():
    layers = gpt_profile(SHAPE, 1, DEVICES["a100-40gb"])
    stages = (Stage(layers[:5], is_last=False), Stage(layers[5:], is_last=True))
    plan = build_plan(
        SCHEDULES.get("zb_h1")(shape=PipelineShape(2, 4)), layers_per_stage=[5, 21], recomputed_layers=[0, 0]
    )
    logits, vector = 1024 * 50304, 2 * 1024 * 1024
    row = predict(plan, PipelineProfile(stages, MIXED_ADAM))[1]
    assert row.loss == (2 * vector + 4 * logits) + (vector + 2 * logits)
    assert row.loss < row.activations
