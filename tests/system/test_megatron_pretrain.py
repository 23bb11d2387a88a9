"""Megatron-LM's own pretrain_gpt.py, unmodified, with this package's flags: losses as without them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ext.testing.ranks import free_port

CHECKOUT = os.environ.get("MEGATRON_LM")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.system,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM: the wheel has no training code"
    ),
]

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 16 --train-iters 3 --lr 1e-3
    --transformer-impl local --distributed-backend gloo --tokenizer-type NullTokenizer
    --no-persist-layer-norm --no-gradient-accumulation-fusion
    --log-interval 1 --eval-iters 1 --eval-interval 2
""")
MOCK = ["--vocab-size", "63", "--mock-data"]
LOSS = re.compile(r"lm loss(?: value)?: (\S+)(?: .*grad norm: (\S+))?")


def _launch(
    num_ranks, options, *, through=("run_scripts/pretrain_gpt.py", "--megatron", CHECKOUT, "--cpu", "--"), **more
):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-port", str(free_port()), *through, *MODEL, *options]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environ |= more
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)


def _losses(done):
    """Training losses with gradient norms, and validation losses, as printed."""
    found = LOSS.findall(done.stdout + done.stderr)
    assert len(found) == 6, "\n".join([line for line in done.stderr.splitlines() if "warn" not in line][-90:])
    return found


def _summaries(done):
    return [line for line in done.stderr.splitlines() if line.startswith("megatron-deepspeed-ext ")]


PIPELINE = ["--pipeline-model-parallel-size", "2", *MOCK]


@pytest.fixture(scope="module")
def stock():
    """Two stages without our flags: Megatron's own schedule, through our launcher."""
    done = _launch(2, PIPELINE)
    assert not _summaries(done)
    return _losses(done)


def test_a_schedule_with_recompute_and_its_trace(stock, tmp_path):
    trace = ["--ext-trace-path", str(tmp_path / "trace.json"), "--ext-trace-steps", "1,2"]
    done = _launch(2, [*PIPELINE, "--ext-pipeline-schedule", "shifted_critical_path", *trace])
    assert _losses(done) == stock  # dropout is on by default in Megatron
    (line,) = _summaries(done)
    assert "schedule shifted_critical_path, 2 ranks x 8 micro-batches, layers per stage 2,2" in line
    assert "recomputed layers 2,0" in line
    command = [sys.executable, "-m", "ext", "trace", "diff", "--json", str(tmp_path / "trace.json")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = json.loads(subprocess.run(command, env=environ, cwd=ROOT, check=True, capture_output=True).stdout)
    assert len(found["stages"]) == 2


def test_split_backward_through_ext_run_and_a_config_file(stock, tmp_path):
    file = tmp_path / "ext.json"
    file.write_text('{"pipeline": {"schedule": "zb_h1"}, "recompute": {"policy": [1, 0]}}')
    through = ("-m", "ext.run", "--cpu", f"{CHECKOUT}/pretrain_gpt.py")
    done = _launch(2, [*PIPELINE, "--ext-config", str(file)], through=through)
    assert _losses(done) == stock
    assert "recomputed layers 1,0" in _summaries(done)[0]


def test_auto_within_a_budget_and_its_plan_from_the_file(stock, tmp_path):
    auto = ["--ext-pipeline-schedule", '{"type": "auto", "search_seconds": 0.5}', "--ext-pipeline-tolerance", "0"]
    budget = ["--ext-recompute-memory-budget-gib", "1"]
    done = _launch(2, [*PIPELINE, *auto, *budget], EXT_RUN_DIR=str(tmp_path), EXT_MEMORY_REPORT="1")
    assert [loss for loss, _ in _losses(done)] == [loss for loss, _ in stock]
    (line,) = _summaries(done)
    assert "recompute as searched (auto)" in line
    assert "predicted memory per stage in" in done.stderr
    assert "measured memory per stage in" in done.stderr
    file = ["--ext-pipeline-schedule", json.dumps({"type": "plan_file", "path": str(tmp_path / "ext_plan.json")})]
    again = _launch(2, [*PIPELINE, *file])
    assert _losses(again) == _losses(done)
    assert line.rpartition("plan ")[2] == _summaries(again)[0].rpartition("plan ")[2]


def test_recomputation_by_parts_of_a_layer(stock):
    """A budget that keeping everything does not fit; its text says what would."""
    options = [*PIPELINE, "--ext-recompute-policy", "lynx_heu", "--ext-recompute-memory-budget-gib"]
    done = _launch(2, [*options, "0.0001"])
    assert done.returncode != 0
    (smallest,) = set(re.findall(r"Smallest budgets .* by stage: (\S+) (\S+), (\S+) (\S+)\. ", done.stderr))
    first, last = (float(smallest[i]) * {"KiB": 2**-20, "MiB": 2**-10}[smallest[i + 1]] for i in (0, 2))
    done = _launch(2, [*options, f"{first * 1.02},{last * 1.02}"])
    assert _losses(done) == stock
    (line,) = _summaries(done)
    assert "recompute lynx_heu" in line
    assert "recomputed layers 2,2" in line


def test_bf16_replicas_and_the_distributed_optimizer():
    options = [*PIPELINE, "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    expected = _losses(_launch(4, options))
    assert _losses(_launch(4, [*options, "--ext-pipeline-schedule", "early_recompute"])) == expected


def test_experts_by_measured_dispatch_and_experts_that_ranks_cannot_share():
    experts = ["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear", *MOCK]
    spread = [*experts, "--expert-model-parallel-size", "4"]
    expected = _losses(_launch(4, spread))
    nodes = ["--ext-moe-topology-ranks-per-node", "2"]
    done = _launch(4, [*spread, *nodes, "--ext-moe-dispatcher", '{"type": "auto", "probe_seconds": 0.5}'])
    assert _losses(done) == expected
    assert re.search(
        r"MoE dispatcher auto \((linear|hierarchical) at .*: linear [\d.e-]+ ms, hierarchical ", done.stderr
    )
    done = _launch(4, [*experts, "--expert-model-parallel-size", "3", *nodes, "--ext-moe-dispatcher", "auto"])
    assert done.returncode != 0
    assert (
        "--expert-model-parallel-size 3: so many ranks cannot share --num-experts 4 evenly. Use 1, 2, 4" in done.stderr
    )


def test_sequence_parallel_recompute():
    options = ["--tensor-model-parallel-size", "2", "--sequence-parallel", *MOCK]
    expected = _losses(_launch(2, options))
    assert _losses(_launch(2, [*options, "--ext-recompute-policy", "full"])) == expected


def test_real_text_from_our_preprocessing(tmp_path):
    prefix, texts = tmp_path / "text", tmp_path / "texts"
    texts.mkdir()
    for number, paragraph in enumerate((ROOT / "LICENSE").read_text().split("\n\n")):
        (texts / f"{number}.txt").write_text(paragraph)
    prepare = [sys.executable, "run_scripts/preprocess_data.py", "--input", str(texts), "--output-prefix", str(prefix)]
    subprocess.run(prepare, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    data = [
        "--pipeline-model-parallel-size",
        "2",
        "--data-path",
        str(prefix),
        "--split",
        "90,5,5",
        "--vocab-size",
        "257",
    ]
    data += ["--data-cache-path", str(tmp_path / "cache")]
    losses = _losses(_launch(2, [*data, "--ext-pipeline-schedule", "gpipe"]))
    first = float(losses[0][0])
    assert 5.0 < first < 6.5  # near log(257): untrained


def test_flags_that_cannot_work_end_the_run_before_it_starts():
    done = _launch(2, [*PIPELINE, "--ext-recompute-policy", "full", "--recompute-activations"])
    assert done.returncode != 0
    text = done.stderr
    assert text.count("--recompute-activations (found True) cannot go with --ext-recompute-policy") == 1
    assert "initialized tensor model parallel" not in done.stdout
    done = _launch(2, [*PIPELINE, "--ext-pipeline-schedul", "1f1b"])
    assert done.stderr.count("--ext-pipeline-schedul: unknown flag. Did you mean '--ext-pipeline-schedule'?") == 1


def test_the_patches_of_the_training_code_know_their_targets():
    """The canary: fails when a new release of Megatron-LM changes a signature or moves a name."""
    code = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
sys.path.append(sys.argv[1])
from ext.adapters.megatron import cpu
cpu.install_training()
import patches
from patches.manager import signature_of

def read(place):
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)

for name in ("megatron_arguments", "megatron_forward_backward"):
    patch = patches.all_patches()[name]
    places = [*patch.places, *(p for p in patch.importers if p.startswith("megatron.training."))]
    before = [read(place) for place in places]
    assert all(value is read(patch.target) for value in before), name
    assert signature_of(read(patch.target)) == patch.signature
    for _ in range(2):
        patches.apply(name)
        assert all(read(place) is read(patch.replacement) for place in places), name
        patches.undo(name)
        assert [read(place) for place in places] == before
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(CHECKOUT)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
