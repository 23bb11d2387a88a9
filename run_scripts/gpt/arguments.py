"""The options of the job, and every check that needs neither torch nor other ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ext.core.errors import ConfigError, nearest

DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "gpt_small_pp2.json"
RUNS = Path("runs")


@dataclass(frozen=True)
class Arguments:
    """The command line, by name; the help texts of `parse` say what each one is."""

    config: Path
    pipeline_stages: int | None
    tensor_parallel: int
    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int | None
    dropout: float
    num_experts: int | None
    top_k: int
    expert_parallel: int | None
    data_path: Path | None
    tokenizer: Path | None
    steps: int
    warmup_steps: int
    lr_floor: float
    seed: int
    eval_every: int
    eval_batches: int
    log_every: int
    save_every: int
    keep_checkpoints: int
    output: Path | None
    resume: Path | None
    log_json: Path | None
    verbose: bool
    check: bool
    world_size: int


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def parse(argv: list[str] | None = None) -> Arguments:
    """Read the command line.

    Raises:
        ConfigError: unknown options, or values that cannot work, all of them at once.
    """
    parser = _Parser(
        description="Train a GPT with pipeline parallelism. Parallelism, optimizer and schedule are in the ds_config.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", "--deepspeed_config", type=Path, default=DEFAULT_CONFIG, help="ds_config.json")
    add("--pipeline-stages", type=int, help="default: pipeline.stages of the ds_config, else one stage per rank")
    add("--tensor-parallel", type=int, default=1, help="ranks that share each layer")
    add("--num-layers", type=int, default=8, help="transformer blocks")
    add("--hidden-size", type=int, default=128)
    add("--num-heads", type=int, default=4)
    add("--seq-length", type=int, default=128, help="tokens of one sample")
    add("--vocab-size", type=int, help="default: that of the tokenizer, which must not be larger")
    add("--dropout", type=float, default=0.0)
    add("--num-experts", type=int, help="experts in the place of each MLP; default: none")
    add("--top-k", type=int, default=2, help="experts per token")
    add("--expert-parallel", type=int, help="ranks that share the experts; default: as many as divide both")
    add("--data-path", type=Path, help="text file, folder, or prefix of .bin and .idx; default: Python's own source")
    add("--tokenizer", type=Path, help="JSON file of the 'tokenizers' package; default: bytes")
    add("--steps", type=int, default=300)
    add("--warmup-steps", type=int, default=30, help="steps until the learning rate of the ds_config is reached")
    add("--lr-floor", type=float, default=0.1, help="last learning rate as a share of the ds_config's")
    add("--seed", type=int, default=1234, help="of weights, dropout and the order of samples")
    add("--eval-every", type=int, default=50, help="steps between evaluations; 0: none")
    add("--eval-batches", type=int, default=16, help="micro-batches per evaluation")
    add("--log-every", type=int, default=10, help="steps between progress lines")
    add("--save-every", type=int, default=100, help="steps between checkpoints; the last step always is one; 0: none")
    add("--keep-checkpoints", type=int, default=2, help="how many stay on disk")
    add("--output", type=Path, help="folder of this run; default: a new one in runs/")
    add("--resume", type=Path, nargs="?", const=Path(), metavar="DIR", help="go on; default: the newest in runs/")
    add("--log-json", type=Path, metavar="FILE", help="also write progress as one JSON object per line")
    add("--verbose", action="store_true", help="show DeepSpeed's messages")
    add("--check", action="store_true", help="only check arguments, config and data")
    add("--world-size", type=int, default=1, help="ranks that --check shall assume")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # added by DeepSpeed's launcher
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        names = [name for name in unknown if name.startswith("-")] or unknown
        raise ConfigError(*(f"{name}: unknown option.{nearest(name, options)} See --help." for name in names))
    values: dict[str, Any] = vars(known)
    del values["local_rank"]
    arguments = Arguments(**values)
    problems = list(_problems(arguments))
    if problems:
        raise ConfigError(*problems)
    return arguments


def _problems(arguments: Arguments) -> Iterator[str]:
    at_least_one = (
        "num_layers hidden_size num_heads seq_length vocab_size num_experts top_k expert_parallel pipeline_stages "
        "tensor_parallel steps eval_batches log_every keep_checkpoints world_size"
    )
    for names, minimum in ((at_least_one, 1), ("warmup_steps eval_every save_every seed", 0)):
        for name in names.split():
            value = getattr(arguments, name)
            if value is not None and value < minimum:
                yield f"{_option(name)}: {value} is not allowed; {minimum} or more."
    for name in ("dropout", "lr_floor"):
        value = getattr(arguments, name)
        if not 0 <= value <= 1:
            yield f"{_option(name)}: {value} is not allowed; a share from 0 to 1."
    if arguments.num_heads >= 1 and arguments.hidden_size % arguments.num_heads:
        yield (
            f"--hidden-size: {arguments.hidden_size} is no multiple of --num-heads {arguments.num_heads}; "
            f"the nearest are {_multiples(arguments.hidden_size, arguments.num_heads)}."
        )

    shared = arguments.tensor_parallel
    if shared > 1 and arguments.num_heads % shared:
        yield (
            f"--tensor-parallel: {shared} ranks cannot share {arguments.num_heads} attention heads evenly. Use a "
            f"divisor of {arguments.num_heads}, or other --num-heads."
        )
    if shared > 1 and arguments.num_experts is not None:
        yield "--tensor-parallel: this job shares no layers with experts. Remove it, or --num-experts."
    experts, ranks = arguments.num_experts, arguments.expert_parallel
    if experts is not None and arguments.top_k > experts:
        yield f"--top-k: {arguments.top_k} experts per token, --num-experts gives {experts}. Lower it or give more."
    if experts is not None and ranks and experts % ranks:
        yield f"--expert-parallel: {ranks} ranks cannot share {experts} experts evenly. Use a divisor of {experts}."
    if experts is None and ranks is not None:
        yield f"--expert-parallel: {ranks} without --num-experts. Give the number of experts, or remove the option."


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} and {below + of}" if below else f"{of}"
