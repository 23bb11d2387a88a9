"""Checkpoints on two real ranks: exact, and safe against a full disk and damaged files."""

import json
import resource
from pathlib import Path

import deepspeed
import pytest
import torch

import ext
from ext.core.errors import CheckpointError, ConfigError, ExtError
from ext.testing.ranks import run_ranks
from gpt import model
from gpt.checkpoint import LATEST, MANIFEST, Checkpoints, find_intact
from gpt.learning_rate import WarmupCosine
from gpt.together import together

CONFIG = model.GPTConfig(vocab_size=50, num_layers=2, hidden_size=16, num_heads=2, sequence_length=8, dropout=0.2)
SAMPLE = (torch.zeros(2, 8, dtype=torch.int64),) * 2
SETTINGS = {"num_layers": 2}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "ext": {"pipeline": {"schedule": "shifted_critical_path"}},
}


def _engine(seed):
    module = model.build(CONFIG, 2, seed, DS_CONFIG, SAMPLE)
    torch.manual_seed(seed)
    parameters = [p for p in module.parameters() if p.requires_grad]
    scheduler = WarmupCosine(2, 20).scheduler
    return ext.initialize(model=module, model_parameters=parameters, config=DS_CONFIG, lr_scheduler=scheduler)[0]


def _train(engine, steps):
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        data = [torch.randint(CONFIG.vocab_size, (2, 2, 8), generator=draw).unbind() for _ in range(4)]
        losses.append(float(engine.train_batch(iter(data))))
    return losses


def _failure(action):
    try:
        action()
    except ExtError as error:
        return type(error).__name__, str(error)
    return None


def _tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _story(rank, world_size, path):
    """Everything that needs ranks, in one launch."""
    deepspeed.init_distributed()
    folder = Path(path)
    seen = {}
    engine = _engine(seed=1)
    checkpoints = Checkpoints(engine, folder, SETTINGS, keep=2)
    _train(engine, range(3))
    checkpoints.save(3)
    seen["uninterrupted"] = _train(engine, range(3, 6))
    other = _engine(seed=99)
    seen["step"] = Checkpoints(other, folder, SETTINGS, keep=2).load(find_intact(folder, SETTINGS))
    seen["resumed"] = _train(other, range(3, 6))

    before = _tree(folder), (folder / LATEST).read_text()
    if rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    seen["full disk"] = _failure(lambda: checkpoints.save(6))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    together(lambda: None)
    seen["untouched"] = before == (_tree(folder), (folder / LATEST).read_text())

    for step in (6, 7, 8):
        checkpoints.save(step)
    seen["kept"] = sorted(path.name for path in folder.iterdir())
    seen["other settings"] = _failure(lambda: find_intact(folder, {"num_layers": 3}))
    damaged = folder / "step_00000008" / "layer_02-model_states.pt"
    if rank == 0:
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    together(lambda: None)
    seen["flipped bit"] = _failure(lambda: find_intact(folder, SETTINGS))
    if rank == 0:
        damaged.unlink()
    together(lambda: None)
    seen["missing file"] = _failure(lambda: find_intact(folder, SETTINGS))
    return seen


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(_story, 2, str(folder), timeout=150)


pytestmark = pytest.mark.dist


def test_a_resumed_run_loses_nothing(story):
    for seen in story[1]:
        assert seen["step"] == 3
        assert seen["resumed"] == seen["uninterrupted"]


def test_a_full_disk_on_one_rank_is_one_error_on_all_and_the_last_checkpoint_stays(story):
    first, second = (seen["full disk"] for seen in story[1])
    assert first == second
    assert first[0] == CheckpointError.__name__
    assert "File too large" in first[1]
    assert str(story[0] / "step_00000003") in first[1]
    assert all(seen["untouched"] for seen in story[1])


def test_the_newest_checkpoints_stay(story):
    assert story[1][0]["kept"] == [LATEST, "step_00000007", "step_00000008"]


def test_the_manifest_lists_every_file(story):
    folder = story[0] / "step_00000007"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert sorted(manifest["files"]) == [name for name in _tree(folder) if name != MANIFEST]
    assert manifest["step"] == 7


def test_other_settings_are_refused_by_name(story):
    for seen in story[1]:
        kind, text = seen["other settings"]
        assert kind == ConfigError.__name__
        assert "was written with num_layers 2, this run has 3" in text


@pytest.mark.parametrize(("what", "says"), [("flipped bit", "is damaged"), ("missing file", "cannot be read")])
def test_a_damaged_file_is_named_on_all_ranks(story, what, says):
    first, second = (seen[what] for seen in story[1])
    assert first == second
    assert first[0] == CheckpointError.__name__
    assert f"layer_02-model_states.pt {says}" in first[1]
