"""Run a training script of Megatron-LM unchanged, with our flags and patches in force."""

from __future__ import annotations

import importlib
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ext.adapters.megatron import apex, arguments
from ext.core.errors import ConfigError

logger = logging.getLogger(__name__)

PATCHES = ("megatron_forward_backward", "megatron_arguments")
CPU = "--cpu"


def run(script: Path, options: Sequence[str], *, checkout: Path | None, cpu: bool) -> None:
    """Run ``script`` with ``options`` as ``__main__``. Does not return before the training ends.

    ``megatron.core`` comes from where Python finds it first, an installed wheel or the checkout; everything else of
    Megatron-LM comes from the checkout.

    Args:
        script: such as pretrain_gpt.py.
        options: Megatron's flags and ours.
        checkout: folder of Megatron-LM; None where Python finds its training code anyway.
        cpu: install the stand-ins that let it run without a GPU, over gloo.

    Raises:
        ConfigError: our flags are wrong, before anything of Megatron is imported, or cannot go with Megatron's; or a
            module that the training code needs is not installed.
        PatchError: this release of Megatron is not known.
    """
    arguments.read(options)
    import patches

    if checkout is not None and str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    if apex.hide_namesake():
        logger.warning("the package apex is not NVIDIA's; hidden from Megatron, which would fail on it")
    try:
        _prepare(cpu)
    except ModuleNotFoundError as error:
        if not cpu and not _has_gpu():
            raise ConfigError(
                f"Megatron-LM's training code needs the module '{error.name}', and there is no GPU here. Add {CPU} in "
                "front of the script (or of --) to run on CPUs, over gloo."
            ) from error
        raise ConfigError(
            f"Megatron-LM's training code needs the module '{error.name}', which is not installed. Run: pip install "
            f"{error.name}"
        ) from error
    sys.argv = [str(script), *options]
    for name in PATCHES:
        patches.apply(name)
    runpy.run_path(str(script), run_name="__main__")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _prepare(cpu: bool) -> None:
    """Import the training code, which on CPUs needs the stand-ins first."""
    if cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # what torch compiles for Megatron needs Triton
        from ext.adapters.megatron import cpu as stand_ins

        stand_ins.install_training()
    else:
        importlib.import_module("megatron.training.arguments")
