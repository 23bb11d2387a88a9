"""Doctor's look at the machine: accelerator, launcher, builds of extensions, ports, memory and disks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ext.commands.doctor_hosts import installed_version
from ext.commands.findings import Finding
from ext.core.extension_locks import ExtensionLock, age, extension_root, find_locks
from ext.core.launch_env import check_launch_environment

GIB = 2**30
DEFAULT_PORT = 29500
MIN_DISK_GIB = 2.0
MIN_MEMORY_GIB = 4.0
MIN_SHM_GIB = 1.0
SHM_BUFFER = "deepspeed_allreduce_buffer_"
TORCH_SECONDS = 120.0
# Runs in a process of its own: a broken torch must not take doctor down with it.
_ASK_TORCH = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"cuda": torch.version.cuda or torch.version.hip, "devices": [
    [torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory] for i in range(n)]}))
"""


def accelerator(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What torch can compute on."""
    if installed_version("torch") is None:
        return
    answer = _ask_torch(environ)
    if isinstance(answer, str):
        yield Finding("error", f"torch cannot be imported: {answer}", "reinstall torch for this machine")
        return
    devices = answer["devices"]
    if devices:
        names = ", ".join(sorted({f"{name}, {memory / GIB:.0f} GiB" for name, memory in devices}))
        yield Finding("ok", f"{len(devices)} GPU(s): {names}; torch is built for CUDA or ROCm {answer['cuda']}")
        if shutil.which("nvcc") is None and not environ.get("CUDA_HOME"):
            yield Finding(
                "info",
                "no nvcc and no CUDA_HOME: DeepSpeed cannot build CUDA extensions such as FusedAdam",
                'install the CUDA toolkit, or use "torch_adam": true in the optimizer\'s params',
            )
    elif Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        yield Finding(
            "warning",
            f"this machine has a GPU, but torch {installed_version('torch')} sees none",
            "install a torch built for it (pytorch.org), and check the driver and CUDA_VISIBLE_DEVICES",
        )
    else:
        fix = "start with: deepspeed --num_accelerators N ..." if shutil.which("numactl") is None else ""
        yield Finding("info", "no GPU: runs are on CPU over gloo, which DeepSpeed counts as one device", fix)
    wanted = environ.get("DS_ACCELERATOR")
    if wanted == "cuda" and not devices:
        yield Finding("error", "DS_ACCELERATOR=cuda is set, but torch sees no GPU", "unset DS_ACCELERATOR")


def launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The deepspeed command, and variables of other launchers."""
    if installed_version("deepspeed") is not None:
        found = shutil.which("deepspeed", path=environ.get("PATH"))
        here = Path(sys.executable).parent / "deepspeed"
        if found is None:
            fix = f"export PATH={here.parent}:$PATH" if here.exists() else "pip install --force-reinstall deepspeed"
            yield Finding("warning", "the launcher 'deepspeed' is not on PATH", fix)
        elif here.exists() and not os.path.samefile(found, here):
            yield Finding(
                "warning",
                f"the launcher on PATH is {found}, of another environment than this Python ({sys.executable})",
                f"export PATH={here.parent}:$PATH",
            )
        else:
            yield Finding("ok", f"launcher {found}")
    for problem in check_launch_environment(environ):
        what, _, fix = problem.partition(": ")
        yield Finding("warning", what, fix)


def extension_locks(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Locks that the next run would wait for."""
    locks = find_locks(environ)
    for lock in locks:
        yield _lock(lock)
    if not locks:
        yield Finding("ok", f"no build of an extension is locked under {extension_root(environ)}")


def _lock(lock: ExtensionLock) -> Finding:
    what = f"extension '{lock.extension}': lock {lock.path} is {age(lock.age_seconds)} old"
    if lock.holders:
        what += f" and held by process {', '.join(map(str, lock.holders))}, which builds it; other runs wait"
        return Finding("info", what, "let it finish")
    what += " and no process here holds it"
    if not lock.certain:
        what += " (those of other users could not be looked at)"
    fix = f"rm {lock.path}"
    if lock.is_stale:
        return Finding("error", f"{what}: a build was killed, and every later run waits for it", fix)
    return Finding(
        "warning",
        f"{what}: a build was killed, or another machine or container builds; every other run waits",
        f"{fix}, unless another machine or container builds it now",
    )


def compilers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What builds extensions: a C++ compiler and ninja."""
    path = environ.get("PATH")
    compiler = environ.get("CXX") or "c++"
    for name, fix in (
        (compiler, "apt-get install g++, or set CXX to a C++17 compiler"),
        ("ninja", "pip install ninja"),
    ):
        found = shutil.which(name, path=path)
        beside = Path(sys.executable).parent
        if found:
            yield Finding("ok", f"{name} is {found}")
        elif (beside / name).exists():
            yield Finding("warning", f"{name} is not on PATH, but beside this Python", f"export PATH={beside}:$PATH")
        else:
            yield Finding("warning", f"{name} is not on PATH: DeepSpeed cannot build its extensions", fix)


def port(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The rendezvous port."""
    text = environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        yield Finding("warning", f"MASTER_PORT={text!r} is no port", "export MASTER_PORT=29500, or unset it")
        return
    number = int(text)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            yield Finding(
                "warning",
                f"port {number}, where ranks meet, cannot be used: {error.strerror}",
                "another run may hold it; start with: deepspeed --master_port <a free port> ...",
            )
            return
    yield Finding("ok", f"port {number} is free")


def disks(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Room for checkpoints, extensions and temporary files."""
    places = {
        "the current folder": Path.cwd(),
        "the extension folder": extension_root(environ),
        "the folder for temporary files": Path(environ.get("TMPDIR") or "/tmp"),
    }
    for name, folder in places.items():
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free / GIB
        if not os.access(existing, os.W_OK):
            yield Finding("warning", f"{name}, {folder}, cannot be written", "use another folder or change its rights")
        elif free < MIN_DISK_GIB:
            yield Finding(
                "warning", f"{name}, {folder}, has {free:.1f} GiB free", "free some space or use another disk"
            )
        else:
            yield Finding("ok", f"{name}, {folder}, has {free:.0f} GiB free")


def memory() -> Iterator[Finding]:
    """Host memory, with a container's limit, and shared memory."""
    available = _available_memory()
    if available is not None:
        what = f"{available:.1f} GiB of host memory available"
        if available < MIN_MEMORY_GIB:
            yield Finding("warning", what, "end other programs or use fewer ranks")
        else:
            yield Finding("ok", what)
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        what = f"/dev/shm has {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
        if usage.free / GIB < MIN_SHM_GIB:
            fix = "remove left-over files there; start a container with --shm-size=16g or --ipc=host"
            yield Finding("warning", what, fix)
        else:
            yield Finding("ok", what)
        yield from _left_buffers(shm)


def _left_buffers(folder: Path, processes: Path = Path("/proc")) -> Iterator[Finding]:
    """What DeepSpeed's CPU communication leaves in shared memory, 66 MiB per rank and run: it never removes it."""
    files = {path.name: path.stat().st_size for path in folder.glob(f"{SHM_BUFFER}*")}
    for maps in processes.glob("[0-9]*/maps") if files else ():
        try:
            used = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if SHM_BUFFER in line}
        except OSError:
            continue  # ended meanwhile, or somebody else's
        files = {name: size for name, size in files.items() if name not in used}
    if files:
        size = sum(files.values()) / GIB
        what = f"{len(files)} buffers of ended DeepSpeed runs hold {size:.2f} GiB of memory in {folder}"
        yield Finding("warning", what, f"when no job runs here: rm {folder}/{SHM_BUFFER}*")


def _available_memory() -> float | None:
    """GiB that this process may still take, None where the system does not say."""
    known: list[float] = []
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        known.append(int(fields["MemAvailable"].split()[0]) * 1024 / GIB)
    except (OSError, KeyError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        known.append((int(limit) - int(used)) / GIB)
    except (OSError, ValueError):  # No such group, or its limit is "max".
        pass
    return min(known) if known else None


def _ask_torch(environ: Mapping[str, str]) -> dict[str, Any] | str:
    """torch's devices, or why it cannot be asked."""
    try:
        command = [sys.executable, "-c", _ASK_TORCH]
        answer = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=TORCH_SECONDS)
        return json.loads(answer.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {TORCH_SECONDS:.0f} s"
    except (ValueError, IndexError):
        lines = answer.stderr.strip().splitlines()
        return lines[-1] if lines else f"the process ended with code {answer.returncode}"
