"""Whether a process knows its place among the ranks that a launcher such as mpirun or srun started."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MV2_COMM_WORLD_SIZE": ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "SLURM_STEP_NUM_TASKS": ("Slurm", "SLURM_PROCID", "SLURM_LOCALID"),
    "SLURM_NTASKS": ("Slurm", "SLURM_PROCID", "SLURM_LOCALID"),
    "PMI_SIZE": ("MPI", "PMI_RANK", "MPI_LOCALRANKID"),
}
"""The variable that holds the number of processes -> launcher, variables of rank and local rank."""


def check_launch_environment(environ: Mapping[str, str], *, world_size: int | None = None) -> list[str]:
    """Problems that would let every process train alone, or not find the others; empty where there are none.

    Without ``world_size`` this looks at variables only and is meant for the time before a process group exists.
    DeepSpeed asks mpi4py for missing variables, so they are no problem where it is installed.

    Args:
        environ: environment of this process.
        world_size: size of the process group that came up, to compare with what the launcher started.
    """
    problems = _wrong_numbers(environ)
    started = _started(environ)
    if started is None:
        return problems
    variable, count = started
    launcher, rank, local_rank = LAUNCHERS[variable]
    missing = [name for name in ("RANK", "WORLD_SIZE") if not environ.get(name)]
    if world_size is None and (not missing or find_spec("mpi4py") is not None):
        return problems
    if world_size is not None and (world_size > 1 or not missing):
        return problems
    problems.append(
        f"{launcher} started {count} processes ({variable}={count}), but {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set: every process would see world size 1 and train alone. "
        f"Start with the deepspeed launcher, or in each process export RANK=${rank} WORLD_SIZE=${variable} "
        f"LOCAL_RANK=${local_rank} and one MASTER_ADDR and MASTER_PORT for all. If one process alone is what you "
        "want, export RANK=0 WORLD_SIZE=1."
    )
    return problems


def _started(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable of the launcher in charge and its number of processes, where that is more than one."""
    for variable in LAUNCHERS:
        value = environ.get(variable, "")
        if value.isdecimal():
            # The first that is set decides: a step of one task inside a larger Slurm allocation is one process.
            return (variable, int(value)) if int(value) > 1 else None
    return None


def _wrong_numbers(environ: Mapping[str, str]) -> list[str]:
    problems = [
        f"{name}={environ[name]!r}: allowed is a whole number, 0 or more."
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if environ.get(name) and not environ[name].isdecimal()
    ]
    rank, world_size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world_size.isdecimal() and int(rank) >= int(world_size):
        problems.append(f"RANK={rank} with WORLD_SIZE={world_size}: ranks run from 0 to WORLD_SIZE - 1.")
    return problems
