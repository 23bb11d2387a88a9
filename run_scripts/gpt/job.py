"""Puts the parts together: process group, data, model, engine, loop, report."""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import ext
from ext.adapters.deepspeed.report import StepReport
from ext.config.batch import read_batch
from ext.core.errors import ConfigError
from ext.recompute.stage_report import lines
from gpt import corpus, device, model, sampling, tensor_parallel
from gpt.arguments import RUNS, Arguments
from gpt.check import vocabulary
from gpt.checkpoint import LATEST, Checkpoints, find_intact
from gpt.learning_rate import WarmupCosine
from gpt.loop import Rhythm, Trainer
from gpt.report import JsonLog, Summary
from gpt.sampling import BatchShape, Sampler
from gpt.together import StopSignal, from_first, together

logger = logging.getLogger(__name__)

RESOLVED_CONFIG = "ext_resolved_config.json"
"""What `ext.initialize` writes into the folder that EXT_RUN_DIR names."""
NUM_REPORTED_STEPS = 12
"""How many of the last steps the report at the end is about."""


def run(arguments: Arguments, ds_config: dict[str, Any], num_stages: int) -> int:
    """Train. Every rank calls it once, with arguments that passed the check.

    Returns:
        0, or the number of the signal that stopped the run.

    Raises:
        ExtError: the same one on every rank.
    """
    with _host_messages(arguments.verbose):
        deepspeed.init_distributed()
    _log_to_stdout(arguments.verbose)
    stop = StopSignal()
    output = from_first(lambda: _run_folder(arguments))
    is_first = dist.get_rank() == 0
    with together(lambda: JsonLog(arguments.log_json if is_first else None)) as log:
        config, data = together(lambda: _load_data(arguments, num_stages))
        settings = {**asdict(config), "pipeline stages": num_stages, "ranks": dist.get_world_size()}
        if arguments.tensor_parallel > 1:
            settings["tensor-parallel ranks"] = arguments.tensor_parallel
        intact = None if arguments.resume is None else find_intact(output / "checkpoints", settings)
        sample = _sample(arguments, ds_config, num_stages, data)
        engine = _engine(arguments, ds_config, config, num_stages, sample, output)
        checkpoints = Checkpoints(engine, output / "checkpoints", settings, arguments.keep_checkpoints)
        start = 0 if intact is None else checkpoints.load(intact)
        trainer = Trainer(
            engine,
            _sampler(engine, data.train, arguments, engine.micro_batches, arguments.seed),
            _sampler(engine, data.validation, arguments, arguments.eval_batches, seed=0),
            checkpoints,
            Rhythm(arguments.steps, arguments.log_every, arguments.eval_every, arguments.save_every),
            log,
            ext.describe(engine)["plan_hash"],
        )
        if intact is not None:
            logger.info("going on after step %d from %s", start, intact.folder)
        signum = trainer.run(start, stop)
    recomputed = list(lines(ext.recompute_report(engine)))
    ending = Ending(trainer.memory_gib(), trainer.figures(NUM_REPORTED_STEPS), recomputed, output, signum)
    if is_first:
        _say_how_it_ended(engine, trainer, ending)
    stop.finish()
    dist.destroy_process_group()
    return signum


def _engine(
    arguments: Arguments,
    ds_config: dict[str, Any],
    config: model.GPTConfig,
    num_stages: int,
    sample: tuple[Tensor, Tensor],
    output: Path,
) -> Any:
    with _host_messages(arguments.verbose):
        if arguments.tensor_parallel == 1:
            module = model.build(config, num_stages, arguments.seed, ds_config, sample)
        else:
            shared_by = arguments.tensor_parallel
            module = tensor_parallel.build(config, num_stages, shared_by, arguments.seed, ds_config, sample)
    tensor_parallel.seed_dropout(arguments.seed + 1, arguments.tensor_parallel)
    learning_rate = WarmupCosine(arguments.warmup_steps, arguments.steps, arguments.lr_floor)
    os.environ["EXT_RUN_DIR"] = str(output)
    engine, *_ = ext.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=ds_config,
        sample_batch=sample,
        lr_scheduler=None if "scheduler" in ds_config else learning_rate.scheduler,
    )
    return engine


def _sample(
    arguments: Arguments, ds_config: dict[str, Any], num_stages: int, data: corpus.Corpus
) -> tuple[Tensor, Tensor]:
    """One micro-batch, the same on every rank."""
    replicas = dist.get_world_size() // (num_stages * arguments.tensor_parallel)
    micro_batch_size = read_batch(ds_config)[0].completed(replicas).micro or 1
    shape = BatchShape(arguments.seq_length, micro_batch_size, num_microbatches=1)
    return next(Sampler(data.train, shape, 0, arguments.seed).batches(0))


def _sampler(engine: Any, tokens: corpus.Range, arguments: Arguments, num_microbatches: int, seed: int) -> Sampler:
    shape = BatchShape(
        arguments.seq_length, engine.train_micro_batch_size_per_gpu(), num_microbatches, engine.dp_world_size
    )
    return Sampler(tokens, shape, engine.grid.get_data_parallel_rank(), seed)


def _load_data(arguments: Arguments, num_stages: int) -> tuple[model.GPTConfig, corpus.Corpus]:
    tokens, vocab_size = vocabulary(arguments)
    data = corpus.find(arguments.data_path).load(tokens)
    for part, name in ((data.train, "training"), (data.validation, "validation")):
        sampling.check(part, name, arguments.seq_length, vocab_size)
    config = model.GPTConfig(
        vocab_size=vocab_size,
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_heads=arguments.num_heads,
        sequence_length=arguments.seq_length,
        dropout=arguments.dropout,
        num_experts=arguments.num_experts,
        top_k=arguments.top_k,
        expert_parallel=_expert_parallel(arguments, dist.get_world_size() // num_stages),
    )
    return config, data


def _expert_parallel(arguments: Arguments, data_parallel: int) -> int:
    """Ranks that share the experts: as asked, else as many as both numbers allow."""
    if arguments.num_experts is None or arguments.expert_parallel is not None:
        return arguments.expert_parallel or 1
    return math.gcd(arguments.num_experts, data_parallel)


def _run_folder(arguments: Arguments) -> Path:
    """Where this run writes. Only rank 0 asks."""
    output = arguments.output
    if arguments.resume is not None:
        return _resumed_folder(arguments.resume if arguments.resume != Path() else output)
    if output is None:
        output = RUNS / f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    if (output / "checkpoints" / LATEST).exists():
        raise ConfigError(
            f"--output: {output} has checkpoints. Go on with --resume {output}, or choose another folder."
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be made: {error.strerror}") from error
    return output


def _resumed_folder(named: Path | None) -> Path:
    if named is not None:
        return named
    runs = sorted(path.parent.parent for path in RUNS.glob(f"*/checkpoints/{LATEST}"))
    if not runs:
        raise ConfigError(f"--resume: no run in {RUNS.absolute()} has a checkpoint. Name its folder: --resume DIR.")
    return runs[-1]


@dataclass(frozen=True)
class Ending:
    """What the ranks found out together when the loop was over."""

    memory_gib: tuple[float, ...]
    figures: StepReport | None
    recomputed: list[str]
    output: Path
    signum: int


def _say_how_it_ended(engine: Any, trainer: Trainer, ending: Ending) -> None:
    if ending.signum:
        name = signal.Signals(ending.signum).name
        print(f"stopped by {name}; go on with --resume {ending.output}", flush=True)
    active, figures = ext.describe(engine), ending.figures
    Summary(
        num_steps=engine.global_steps,
        schedule=active["schedule"] or "DeepSpeed's own schedule",
        plan_hash=active["plan_hash"],
        losses=trainer.history.losses,
        validation_losses=trainer.history.validation_losses,
        tokens_per_s=trainer.tokens_per_s,
        step_time_s=trainer.history.step_time_s if figures is None else figures.step_time_s,
        simulated_step_time_s=None if figures is None else figures.simulated_step_time_s,
        bubble=None if figures is None else figures.bubble,
        simulated_bubble=None if figures is None else figures.simulated_bubble,
        memory_gib=ending.memory_gib,
        memory_kind="resident memory" if device.is_cpu() else "device memory",
        live_bytes=[(row.measured, row.live) for row in ext.memory_report(engine)],
        recomputed=ending.recomputed,
        checkpoint=trainer.history.checkpoint,
        resolved_config=ending.output / RESOLVED_CONFIG,
    ).show(Console())


def _log_to_stdout(verbose: bool) -> None:
    """Rank 0 says what happens, the others only what is wrong."""
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    level = logging.INFO if verbose or dist.get_rank() == 0 else logging.WARNING
    for name in ("gpt", "ext"):
        logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _host_messages(verbose: bool) -> Iterator[None]:
    """What DeepSpeed prints while it builds things is shown only on request."""
    if not verbose:
        # Its broadcast of tied weights, which are leaves, makes autograd say this in every run.
        warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
        yield
