"""NVIDIA's apex and its namesake on PyPI, a web framework, which megatron.core takes for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OFFERED = ("multi_tensor_apply", "normalization", "optimizers")


def is_nvidias(folders: Iterable[Path]) -> bool:
    """Whether a package ``apex`` in these folders is NVIDIA's, by what it offers."""
    return any(all((folder / name).is_dir() for name in OFFERED) for folder in folders)


def hide_namesake() -> bool:
    """Make ``import apex`` fail in this process where it would find another package than NVIDIA's.

    Megatron then uses torch's norms and optimizers, as without apex. Call before ``megatron`` is imported.

    Returns:
        Whether there is such a package.
    """
    modules: dict[str, Any] = sys.modules
    if "apex" in modules:
        return modules["apex"] is None
    spec = find_spec("apex")
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if is_nvidias(folders):
        return False
    modules["apex"] = None
    return True
