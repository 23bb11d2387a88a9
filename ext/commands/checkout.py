"""The checkout of Megatron-LM that a run works with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ext.commands.doctor_hosts import checkout_findings, installed_version, without_training_code
from ext.core.errors import ConfigError
from ext.core.versions import OLDEST


def find_checkout(given: str | None) -> Path:
    """The folder ``given``, of Megatron-LM; where its release is not that of the installed core, rank 0 says so.

    Raises:
        ConfigError: none is given, or it is none; says how to get one.
    """
    installed = installed_version("megatron-core")
    if not given:
        if installed is None:
            raise ConfigError(
                f"megatron-core is not installed. Run: pip install 'megatron-core>={OLDEST['megatron-core']}'"
            )
        what, fix = without_training_code(installed)
        raise ConfigError(f"{what}. Fix: {fix}")
    checkout = Path(given).expanduser().resolve()
    for finding in checkout_findings(checkout, installed):
        if finding.level == "error":
            raise ConfigError(f"{finding.what}. Fix: {finding.fix}")
        if finding.level == "warning" and os.environ.get("RANK", "0") == "0":
            print(f"warning: {finding.what}. Fix: {finding.fix}", file=sys.stderr, flush=True)  # noqa: T201
    return checkout
