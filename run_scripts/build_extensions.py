"""Build the extension that DeepSpeed loads on CPUs, before any rank has to wait for it.

It takes half a minute, two on a busy machine, once per environment. A build that was killed leaves a lock file on
which every later one waits without a word; such a file is removed here. Only one process may run this at a time:
setup_env.sh sees to it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ext.core.extension_locks import ExtensionLock, find_locks, waiting_for

NAME = "deepspeed_shm_comm"


def main() -> None:
    """Build it unless it is there."""
    if shutil.which("nvidia-smi") and os.environ.get("DS_ACCELERATOR") != "cpu":
        return  # only the CPU accelerator loads it
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / NAME
    is_interrupted = clear_lock(folder / "lock")
    if (folder / f"{NAME}.so").exists() and not is_interrupted:
        return
    if shutil.which("c++") is None:
        sys.exit("no C++ compiler found; DeepSpeed needs one on CPUs: install g++")
    print(f"building DeepSpeed's extension {NAME} in {folder.parent}: half a minute to two, once", file=sys.stderr)
    from deepspeed.accelerator import get_accelerator

    began = time.monotonic()
    accelerator: Any = get_accelerator()
    accelerator.create_op_builder("ShareMemCommBuilder").load(verbose=False)
    print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr)


def clear_lock(path: Path) -> bool:
    """Wait for the build that holds the lock, or remove a lock that no process holds.

    Returns:
        Whether it was removed, so that the build must be done again.
    """
    said = False
    while lock := _lock_at(path):
        if not lock.holders and lock.certain:
            print(f"removing {path}: its build is no longer running", file=sys.stderr)
            path.unlink(missing_ok=True)
            return True
        if not said:
            print(*waiting_for(), sep="\n", file=sys.stderr)
            said = True
        time.sleep(0.5)
    return False


def _lock_at(path: Path) -> ExtensionLock | None:
    return next((lock for lock in find_locks() if lock.path == path), None)


if __name__ == "__main__":
    main()
