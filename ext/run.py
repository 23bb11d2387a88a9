"""Run an unchanged training script so that it obeys the ``"ext"`` block of its ds_config.

    deepspeed --module ext.run train.py --deepspeed_config ds_config.json

The script's own ``deepspeed.initialize`` becomes `ext.initialize`, and pipeline modules that it builds have their
layers placed by ``ext.pipeline.partition``. A config that cannot work is refused before the script starts.

    torchrun --nproc-per-node 8 -m ext.run pretrain_gpt.py <Megatron flags> --ext-pipeline-schedule zb_h1

A script in a checkout of Megatron-LM, or one that gets ``--ext-`` flags, is a script of Megatron; ``--cpu`` in front of
it runs it without a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ext.commands.checkout import find_checkout
from ext.config import ExtConfig, check_config, read_ds_config
from ext.core.errors import ConfigError, ExtError
from ext.core.launch_env import check_launch_environment

PATCHES = ("deepspeed_initialize",)
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 3
_HEAD_START_S = 2.0


def main(arguments: Sequence[str]) -> int:
    """Run ``[option ...] script [argument ...]``; what stands before the script is passed on to it.

    Returns:
        0, 3 for a config that cannot work, 1 for another error of ours. What the script itself raises is its own.
    """
    try:
        script, rest = _split(arguments)
        _refuse_what_cannot_work(rest)
        _place_layers(rest)
        _run(script, rest)
    except ExtError as error:
        # Every rank fails with the same text and one of each machine says it, before the launcher ends them all.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - a command's answer
        else:
            time.sleep(_HEAD_START_S)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return 0


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The script and all other arguments; the launcher puts ``--local_rank=N`` in front of the script."""
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            if not Path(argument).is_file():
                raise ConfigError(f"the training script '{argument}' does not exist.")
            return argument, [*arguments[:position], *arguments[position + 1 :]]
    raise ConfigError("no training script given. Usage: deepspeed --module ext.run SCRIPT [ARGUMENT ...]")


def _refuse_what_cannot_work(arguments: Sequence[str]) -> None:
    problems = check_launch_environment(os.environ)
    config = _option(arguments, "--deepspeed_config")
    if config is not None:
        world_size = os.environ.get("WORLD_SIZE")
        found = check_config(read_ds_config(config), world_size=int(world_size) if world_size else None)
        problems += [f"{problem.key}: {problem.message}" for problem in found]
    if problems:
        raise ConfigError(*problems)


def _place_layers(arguments: Sequence[str]) -> None:
    """Have the script's pipeline modules obey the partition of its config, where that moves layers."""
    path = _option(arguments, "--deepspeed_config")
    ds_config = None if path is None else read_ds_config(path)
    config = None if ds_config is None else ExtConfig.from_ds_config(ds_config)
    if config is None or config.pipeline is None or not config.pipeline.partition.places_layers:
        return
    import patches
    from ext.adapters.deepspeed.placement import ScriptPipelineModule

    ScriptPipelineModule.ds_config = ds_config
    patches.apply("deepspeed_pipeline_module")


def _option(arguments: Sequence[str], name: str) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == name:
            return arguments[position + 1] if position + 1 < len(arguments) else None
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def _run(script: str, arguments: Sequence[str]) -> None:
    if _is_for_megatron(script, arguments):
        _run_megatron(Path(script), arguments)
        return
    import patches

    for name in PATCHES:
        patches.apply(name)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _is_for_megatron(script: str, arguments: Sequence[str]) -> bool:
    return _has_training_code(Path(script).resolve().parent) or any(a.startswith("--ext-") for a in arguments)


def _run_megatron(script: Path, arguments: Sequence[str]) -> None:
    from ext.adapters.megatron import launch

    folder = script.resolve().parent
    given = str(folder) if _has_training_code(folder) else os.environ.get("MEGATRON_LM")
    if given != str(folder):  # a checkout goes behind the installed core, which has its compiled parts
        sys.path.insert(0, str(folder))
    is_found = find_spec("megatron") is not None and find_spec("megatron.training") is not None
    launch.run(
        script,
        [argument for argument in arguments if argument != launch.CPU],
        checkout=None if given is None and is_found else find_checkout(given),
        cpu=launch.CPU in arguments,
    )


def _has_training_code(folder: Path) -> bool:
    return (folder / "megatron" / "training").is_dir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
