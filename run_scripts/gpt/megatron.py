"""The Megatron side of pretrain_gpt.py: an unmodified checkout of Megatron-LM, run with this package's flags.

    torchrun --nproc-per-node 4 run_scripts/pretrain_gpt.py --megatron PATH -- <Megatron flags> [--ext-... flags]

Everything behind ``--`` is Megatron's, and ours where it starts with ``--ext-``. ``--script NAME`` runs another script
of the checkout, ``--cpu`` runs without a GPU. Without ``--megatron`` the checkout is the one that MEGATRON_LM names.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ext.adapters.megatron import launch
from ext.commands.checkout import find_checkout
from ext.core.errors import ConfigError
from ext.core.launch_env import check_launch_environment

CHECKOUT = "--megatron"
SEPARATOR = "--"


def is_asked(arguments: Sequence[str]) -> bool:
    """Whether a command line of pretrain_gpt.py is for Megatron: it names a checkout, or has ``--``."""
    return any(a in (CHECKOUT, SEPARATOR) or a.startswith(f"{CHECKOUT}=") for a in arguments)


def run(arguments: Sequence[str]) -> None:
    """Check the checkout and the launch, then run the script.

    Raises:
        ConfigError: no checkout, another folder, or options that are not known.
    """
    own, options = _split(arguments)
    parsed = _parser().parse_args(own)
    checkout = find_checkout(parsed.megatron or os.environ.get("MEGATRON_LM"))
    script = checkout / parsed.script
    problems = check_launch_environment(os.environ)
    if not script.is_file():
        problems.append(f"--script {parsed.script}: {checkout} has no such file.")
    if problems:
        raise ConfigError(*problems)
    launch.run(script, options, checkout=checkout, cpu=parsed.cpu)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    if SEPARATOR not in arguments:
        return list(arguments), []
    at = list(arguments).index(SEPARATOR)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py", allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(CHECKOUT, metavar="PATH", help="folder of a Megatron-LM checkout (default: $MEGATRON_LM)")
    parser.add_argument("--script", default="pretrain_gpt.py", help="script of the checkout (default: pretrain_gpt.py)")
    parser.add_argument(launch.CPU, action="store_true", help="run on CPUs over gloo, for trying things out")
    return parser
