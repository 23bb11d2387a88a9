"""Build the extension that DeepSpeed loads on CPUs, before any rank has to wait for it.

It takes half a minute, two on a busy machine, once per environment. A build that was killed leaves a lock file on
which every later one waits without a word; such a file is removed here.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

NAME = "deepspeed_shm_comm"
FRESH_S = 30
"""A lock younger than this may belong to a build whose compiler has not started yet."""


def main() -> None:
    if shutil.which("nvidia-smi") and os.environ.get("DS_ACCELERATOR") != "cpu":
        return  # only the CPU accelerator loads it
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / NAME
    lock = folder / "lock"
    if (folder / f"{NAME}.so").exists() and not lock.exists():
        return
    if lock.exists():
        _wait_or_remove(folder, lock)
    if shutil.which("g++") is None and shutil.which("c++") is None:
        sys.exit("no C++ compiler found; DeepSpeed needs one on CPUs: install g++")
    print(f"building DeepSpeed's extension {NAME} in {folder.parent}: half a minute to two, once", file=sys.stderr)
    from deepspeed.accelerator import get_accelerator

    began = time.monotonic()
    accelerator: Any = get_accelerator()
    accelerator.create_op_builder("ShareMemCommBuilder").load(verbose=False)
    print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr)


def _wait_or_remove(folder: Path, lock: Path) -> None:
    """Wait for a build that is alive; remove the lock of one that is not."""
    said = False
    while lock.exists():
        if not _is_built_now(folder) and time.time() - lock.stat().st_mtime > FRESH_S:
            print(f"removing {lock}: its build is no longer running", file=sys.stderr)
            lock.unlink(missing_ok=True)
            return
        if not said:
            print(f"waiting for the build that holds {lock}", file=sys.stderr)
            said = True
        time.sleep(1)


def _is_built_now(folder: Path) -> bool:
    """Whether a process works inside the folder, as compilers do."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve(strict=True) == folder.resolve():
                return True
        except OSError:
            continue  # the process ended, or belongs to someone else
    return False


if __name__ == "__main__":
    main()
