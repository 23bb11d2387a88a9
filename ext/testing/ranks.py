"""Run a function on several real ranks over gloo, each a process of its own.

Processes come from a fork server with torch already imported (1.2 s for two ranks where a fresh interpreter
takes 6.5 s). Every rank has a deadline; one that misses it is named, with the Python stack it hung in.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from ext.core.errors import ExtError

_PRELOAD = ["torch", "torch.distributed", "ext.testing.ranks"]
_GRACE_S = 8.0


class RanksFailed(ExtError, AssertionError):
    """One or more ranks raised, died or missed the deadline.

    Attributes:
        failures: by rank, the text of the exception with its traceback, or of the stack it hung in.
        errors: by rank, the exception itself where it could be pickled.
    """

    def __init__(self, failures: Mapping[int, str], errors: Mapping[int, BaseException]) -> None:
        self.failures = dict(failures)
        self.errors = dict(errors)
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(self.failures.items())))


def preload(*modules: str) -> None:
    """Import these modules in the fork server too. Effective before the first `run_ranks` only."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``fn(rank, world_size, *args)`` on every rank, inside a gloo process group.

    Args:
        fn: a function at the top level of its file.
        world_size: number of ranks.
        args: picklable arguments, the same for every rank.
        timeout: seconds until ranks that still run are ended.
        env: more environment variables for the ranks.

    Returns:
        The picklable results, by rank.

    Raises:
        RanksFailed: a rank raised, died, or missed the deadline.
    """
    context = multiprocessing.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(_PRELOAD)
    target = (fn.__module__, inspect.getsourcefile(fn), fn.__qualname__)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        settings = {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            **(env or {}),
        }
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, settings, target, pickle.dumps(args)))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        _join(processes, Path(folder), time.monotonic() + timeout)
        return _collect(processes, Path(folder), timeout)


def free_port() -> int:
    """A TCP port that was free a moment ago, below those that the system hands out by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # whatever seed a test has set
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def _join(processes: Sequence[Any], folder: Path, deadline: float) -> None:
    """Wait for all; after the first failure the others get a short grace to report what they saw."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks
    if late:
        time.sleep(0.5)
    for process in late:
        process.kill()
    for process in processes:
        process.join()


def _collect(processes: Sequence[Any], folder: Path, timeout: float) -> list[Any]:
    results: list[Any] = []
    failures: dict[int, str] = {}
    errors: dict[int, BaseException] = {}
    for rank, process in enumerate(processes):
        outcome = folder / f"result{rank}"
        if outcome.exists():
            ok, value, error = pickle.loads(outcome.read_bytes())
            if ok:
                results.append(value)
                continue
            failures[rank] = value
            if error is not None:
                errors[rank] = pickle.loads(error)
        else:
            stack = folder / f"stack{rank}"
            text = stack.read_text() if stack.exists() else ""
            died = f"died with exit code {process.exitcode}" if not text else f"still running after {timeout:g} s"
            failures[rank] = f"{died}, or {_GRACE_S:g} s after another rank failed\n{text}"
    if failures:
        raise RanksFailed(failures, errors)
    return results


def _rank_main(
    rank: int, world_size: int, folder: str, env: Mapping[str, str], target: tuple[str, str, str], args: bytes
) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    with open(Path(folder) / f"stack{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        outcome: tuple[bool, Any, bytes | None]
        try:
            outcome = (True, _call(rank, world_size, folder, target, args), None)
        except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported to the parent
            outcome = (False, traceback.format_exc(), _pickled(error))
        path = Path(folder) / f"result{rank}"
        path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
        path.with_suffix(".part").rename(path)
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip destructors: gloo's may wait for peers that have already left.
        os._exit(0 if outcome[0] else 1)


def _call(rank: int, world_size: int, folder: str, target: tuple[str, str, str], args: bytes) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn = _load(*target)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=120),
    )
    result = fn(rank, world_size, *pickle.loads(args))
    dist.barrier()
    return result


def _load(module_name: str, path: str, qualname: str) -> Callable[..., Any]:
    """The function by its file: test modules are no importable packages."""
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != path:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    fn: Any = module
    for part in qualname.split("."):
        fn = getattr(fn, part)
    return fn


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an exception class of anybody's may refuse in any way
        return None
    return data
