"""Everything that can be refused before there is a process group; needs no torch, so that it takes no time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ext.config import check_config
from ext.config.source import read_ds_config
from ext.core.errors import ConfigError
from ext.core.launch_env import check_launch_environment
from gpt import corpus, tokenizer
from gpt.arguments import Arguments
from gpt.tokenizer import Tokenizer

NUM_OTHER_LAYERS = 4
"""Layers of the model that are no transformer blocks: embedding, positions, final norm, head."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def check(arguments: Arguments) -> tuple[dict[str, Any], int]:
    """Refuse what cannot work.

    Returns:
        The ds_config and the number of pipeline stages.

    Raises:
        ConfigError: all problems of the config at once.
        DataError: the data is not there or not readable.
    """
    if not arguments.check:
        _require_launcher(os.environ)
    ds_config = read_ds_config(arguments.config)
    world_size = arguments.world_size if arguments.check else int(os.environ["WORLD_SIZE"])
    num_stages = _num_stages(arguments, ds_config, world_size)
    replicas = world_size // (num_stages * arguments.tensor_parallel)
    problems = [*_own_problems(arguments, ds_config, num_stages, replicas)]
    problems += map(
        str,
        check_config(
            ds_config,
            world_size=world_size,
            pipeline_stages=num_stages,
            tensor_parallel=arguments.tensor_parallel,
            num_layers=arguments.num_layers + NUM_OTHER_LAYERS,
        ),
    )
    if problems:
        raise ConfigError(*problems)
    vocabulary(arguments)
    corpus.find(arguments.data_path)
    return ds_config, num_stages


def vocabulary(arguments: Arguments) -> tuple[Tokenizer, int]:
    """The tokenizer and the size of the model's vocabulary.

    Raises:
        ConfigError: the tokenizer cannot be loaded or has more tokens than the vocabulary.
    """
    tokens = tokenizer.load(arguments.tokenizer)
    size = arguments.vocab_size or tokens.vocab_size
    if size < tokens.vocab_size:
        raise ConfigError(f"--vocab-size: {size} is too small, the tokenizer has {tokens.vocab_size} tokens.")
    return tokens, size


def _require_launcher(environment: Mapping[str, str]) -> None:
    problems = check_launch_environment(environment)
    if problems:
        raise ConfigError(*problems)
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: this process does not know its place among the ranks. Start it with "
            f"run_scripts/pretrain_gpt.sh, with 'deepspeed --num_accelerators N run_scripts/pretrain_gpt.py', or set "
            f"{', '.join(LAUNCHER_VARIABLES)} in each process."
        )


def _num_stages(arguments: Arguments, ds_config: Mapping[str, Any], world_size: int) -> int:
    if arguments.pipeline_stages is not None:
        return arguments.pipeline_stages
    stages = _option(ds_config, "pipeline", "stages", "auto")
    if stages == "auto":
        return max(1, world_size // arguments.tensor_parallel)
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise ConfigError(f"pipeline.stages: found {stages!r}; allowed: a whole number above 0, or 'auto'.")
    return stages


def _own_problems(
    arguments: Arguments, ds_config: Mapping[str, Any], num_stages: int, data_parallel: int
) -> Iterator[str]:
    zero_stage = _option(ds_config, "zero_optimization", "stage", 0)
    if _option(ds_config, "bf16", "enabled", False) and zero_stage == 0 and (arguments.save_every or arguments.resume):
        yield (
            "bf16.enabled: DeepSpeed cannot load the checkpoints that it writes for bf16 without ZeRO. "
            "Set zero_optimization.stage to 1, or --save-every 0 for a run without checkpoints."
        )
    if arguments.num_experts is None and _has_moe_block(ds_config):
        yield "ext.moe: the model has no experts. Give --num-experts, say 8, or remove the block."
    if arguments.expert_parallel and data_parallel and data_parallel % arguments.expert_parallel:
        yield (
            f"--expert-parallel: {arguments.expert_parallel} ranks do not divide the {data_parallel} "
            f"replicas. Use a divisor of {data_parallel}."
        )
    if arguments.tensor_parallel > 1 and _partition(ds_config) in ("recompute_aware", "auto"):
        yield (
            f"ext.pipeline.partition: '{_partition(ds_config)}' measures the layers on one rank, which cannot run "
            "layers that --tensor-parallel shares. Use 'uniform', or a list of layers per stage."
        )
    if arguments.num_layers < num_stages:
        yield (
            f"--num-layers: {arguments.num_layers} transformer blocks cannot fill {num_stages} pipeline stages. "
            f"Use more layers or fewer stages."
        )


def _has_moe_block(ds_config: Mapping[str, Any]) -> bool:
    block = ds_config.get("ext")
    return isinstance(block, dict) and block.get("enabled", True) is not False and block.get("moe") is not None


def _partition(ds_config: Mapping[str, Any]) -> Any:
    block = ds_config.get("ext")
    partition = _option(block, "pipeline", "partition", None) if isinstance(block, dict) else None
    return partition.get("type") if isinstance(partition, dict) else partition


def _option(ds_config: Mapping[str, Any], block: str, key: str, default: Any) -> Any:
    options = ds_config.get(block)
    return options.get(key, default) if isinstance(options, dict) else default
