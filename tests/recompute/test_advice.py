"""The nearest change that fits: what is named does fit, and nothing nearer would."""

import itertools
import re

import pytest

from ext.cost.gpt import gpt_profile
from ext.cost.hardware import DEVICES
from ext.cost.states import MIXED_ADAM
from ext.cost.transformer import TransformerShape
from ext.pipeline.build import build_plan
from ext.pipeline.memory_table import GIB, predict
from ext.pipeline.plan import PipelineShape
from ext.pipeline.schedule import SCHEDULES
from ext.pipeline.stage_model import PipelineProfile, Stage
from ext.recompute.advice import nearest_change

SHAPE = TransformerShape(hidden_size=1024, num_heads=16, num_layers=16, seq_length=1024, vocab_size=50304)
LAYERS = gpt_profile(SHAPE, 8, DEVICES["a100-40gb"])


def _profile(bounds):
    parts = [LAYERS[start:stop] for start, stop in itertools.pairwise(bounds)]
    return PipelineProfile(tuple(Stage(part, is_last=i == 3) for i, part in enumerate(parts)), MIXED_ADAM)


def _schedule(name):
    return SCHEDULES.get(name)(shape=PipelineShape(4, 8))


def _numbers(text, key):
    return [int(word) for word in re.search(rf"{re.escape(key)} \[([^]]*)\]", text)[1].split(",")]


EQUAL = _profile([0, 5, 9, 13, 18])


def test_more_recomputation_comes_first():
    budgets = [4 * GIB, 4 * GIB, 4 * GIB, 9 * GIB]
    text = nearest_change(_schedule("1f1b"), EQUAL, budgets)
    assert text.startswith("Nearest change that fits: ext.recompute.policy [")
    counts = _numbers(text, "ext.recompute.policy")
    plan = build_plan(_schedule("1f1b"), layers_per_stage=[5, 4, 4, 5], recomputed_layers=counts)
    assert not any(row.exceeds for row in predict(plan, EQUAL, budgets))
    assert counts[0] > counts[3]


def test_then_moved_layers():
    """No recomputation makes room for states: the last stage has too many layers for its budget."""
    heavy = _profile([0, 3, 5, 7, 18])
    budgets = [5 * GIB] * 3 + [8 * GIB]
    text = nearest_change(_schedule("1f1b"), heavy, budgets)
    assert text.startswith("Nearest change that fits: ext.pipeline.partition [")
    layers = _numbers(text, "ext.pipeline.partition")
    assert sum(layers) == len(LAYERS)
    assert layers[3] < 11


def test_then_the_schedule_that_holds_least():
    """zb_h1 holds all micro-batches in flight whole until their W."""
    least = [3.2 * GIB] * 3 + [8.5 * GIB]
    text = nearest_change(_schedule("zb_h1"), EQUAL, least)
    assert "ext.pipeline.schedule '1f1b' with ext.recompute.policy [" in text


def test_then_a_smaller_micro_batch_and_then_nothing():
    text = nearest_change(_schedule("1f1b"), EQUAL, [5 * GIB] * 4)
    assert re.match(r"Nearest change that fits: 1/\d of the micro-batch, with ext.pipeline.schedule '1f1b' and ", text)
    text = nearest_change(_schedule("1f1b"), EQUAL, [0.1 * GIB] * 4)
    assert text.startswith("No other recomputation, layout or schedule fits")
    assert len(re.findall(r"\d+\.\d{3} GiB", text)) == 4


@pytest.mark.parametrize("name", ["1f1b", "shifted_critical_path"])
def test_smaller_budgets_never_ask_for_less_recomputation(name):
    last = None
    for gib in (14, 9, 8.8, 8.6):
        text = nearest_change(_schedule(name), EQUAL, [gib * GIB] * 4)
        if not text.startswith("Nearest change that fits: ext.recompute.policy"):
            break
        total = sum(_numbers(text, "ext.recompute.policy"))
        assert last is None or total >= last
        last = total
    assert last is not None
