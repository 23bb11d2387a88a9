"""Planning must start fast and run where no torch is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "ext.core.registry, ext.core.model",
    "ext.pipeline.build, ext.pipeline.simulate, ext.pipeline.grid, ext.pipeline.layout, ext.pipeline.schedules",
    "ext.__main__, ext.commands.simulate",
)


@pytest.mark.parametrize("modules", MODULES)
def test_import_brings_no_torch(modules):
    code = (
        f"import sys, {modules}\n"
        "heavy = {'torch', 'numpy', 'scipy', 'deepspeed', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
