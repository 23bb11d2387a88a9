"""What is light to import stays light: no torch where plans and configs are made, nor in any package's __init__."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIGHT = ("core", "cost", "pipeline", "planner", "config")


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _heavy_after(modules):
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "print(*sorted({'torch', 'deepspeed', 'megatron'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_packages_import_no_torch():
    assert _heavy_after(sorted(_module(path) for path in (ROOT / "ext").rglob("__init__.py"))) == []


@pytest.mark.parametrize("package", LIGHT)
def test_light_packages_import_no_torch(package):
    assert _heavy_after(sorted(_module(path) for path in (ROOT / "ext" / package).rglob("*.py"))) == []
