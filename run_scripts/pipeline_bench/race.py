"""Runs the contestants on real ranks, taking turns, and times their steps."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from emulated_network import DEVICE, emulated_network, enter
from ext.pipeline.plan import Plan
from ext.testing.ranks import preload, run_ranks
from pipeline_bench.setting import Contestant, Setting

DEEPSPEED, MEGATRON = "pipeline_bench.contestants", "pipeline_bench.megatron"
HOSTS = {DEEPSPEED: ("ext.adapters.deepspeed.testing",), MEGATRON: ("ext.adapters.megatron.testing",)}
"""Modules with contestants, and what these need loaded first."""

NUM_WARMUP = 3
_START_DELAY_S = 0.02
_LAUNCH_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Outcome:
    """What came of one contestant.

    Attributes:
        plan: the order that it ran; None where it failed.
        seconds: by round: from a start that all ranks share to the end of the last.
        error: why it did not run.
        peaks: most activations that each rank's layers held, by rank, where they count.
    """

    plan: Plan | None
    seconds: tuple[float, ...]
    error: str | None = None
    peaks: tuple[float, ...] = ()


def race(
    setting: Setting,
    contestants: Sequence[Contestant],
    num_rounds: int,
    *,
    host: str = DEEPSPEED,
    is_verbose: bool = False,
) -> dict[str, Outcome]:
    """Every contestant's times, by its name; ``host`` is the module that builds them.

    Raises:
        RanksFailed: a rank died or hung.
        NoEmulatedNetwork: the setting has a latency, and this machine cannot emulate one.
    """
    preload(*HOSTS[host], host)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _namespaces(setting) as namespaces:
        return run_ranks(
            _on_rank,
            setting.num_ranks,
            setting,
            list(contestants),
            num_rounds,
            host,
            namespaces,
            folder,
            is_verbose,
            env={"EXT_RUN_DIR": folder},
            timeout=_LAUNCH_TIMEOUT_S + 4 * num_rounds * len(contestants) * _longest_step(setting),
        )[0]


@contextmanager
def _namespaces(setting: Setting) -> Iterator[list[str]]:
    if not setting.latency:
        yield []
        return
    with emulated_network(setting.num_ranks, delay_us=setting.latency * 1e6) as names:
        yield names


def _longest_step(setting: Setting) -> float:
    work = setting.forward + setting.input_grad + setting.weight_grad + setting.recompute + 4 * setting.latency
    return (setting.num_microbatches + setting.num_ranks) * work


def _on_rank(
    rank: int,
    world_size: int,
    setting: Setting,
    contestants: list[Contestant],
    num_rounds: int,
    host: str,
    namespaces: list[str],
    folder: str,
    is_verbose: bool,
) -> dict[str, Outcome]:
    import torch.distributed as dist

    from pipeline_bench.runner import WARMUP_SHARE, Runner

    if not is_verbose:
        _silence()
    if namespaces:
        dist.destroy_process_group()
        enter(namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    _share_gloo_thread()
    makers: Any = importlib.import_module(host)
    makers.prepare()

    def warm(contestant: Contestant) -> Runner:
        runner = makers.build(contestant, setting, rank)
        runner.pace(WARMUP_SHARE)
        for _ in range(NUM_WARMUP):
            runner.step()
        runner.pace(1.0)
        return runner

    runners: dict[str, Runner] = {}
    outcomes: dict[str, Outcome] = {}
    for contestant in contestants:
        runner, problem = _attempt(lambda contestant=contestant: warm(contestant))
        problems: list[str | None] = [None] * world_size
        dist.all_gather_object(problems, problem)
        found = [f"rank {r}: {text}" for r, text in enumerate(problems) if text is not None]
        if found:
            outcomes[contestant.name] = Outcome(None, (), found[0])
        else:
            assert runner is not None
            runners[contestant.name] = runner
    gc.collect()
    gc.freeze()  # what was built so far is no garbage, and looking through it would cost every step
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(num_rounds):
        names = list(runners)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(_timed(runners[name].step, setting))
    for name, runner in runners.items():
        peaks: list[float | None] = [None] * world_size
        dist.all_gather_object(peaks, runner.peak_activations())
        counted = tuple(peak for peak in peaks if peak is not None)
        outcomes[name] = Outcome(runner.plan, tuple(seconds[name]), peaks=counted)
    return outcomes


def _attempt(make: Any) -> tuple[Any, str | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - whatever keeps a contestant from running is its result
        return None, f"{type(error).__name__}: {error}"


def _timed(step: Any, setting: Setting) -> float:
    """Seconds from a start that all ranks share, behind a barrier, to the end of the slowest."""
    import torch
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    now = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(now, op=dist.ReduceOp.MAX)
    start = now.item() + _START_DELAY_S + 8 * setting.latency
    time.sleep(max(0.0, start - time.monotonic()))
    step()
    end = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(end, op=dist.ReduceOp.MAX)
    return end.item() - start


def _share_gloo_thread() -> None:
    """Let all gloo groups that this process makes from now on be served by one thread.

    Each group has one otherwise, which wakes a hundred times a second whether there is anything to do or not: those
    of the contestants that wait for their turn would take a good part of a core from the one whose turn it is.
    """
    import torch
    from torch.distributed import distributed_c10d

    original: Any = distributed_c10d.ProcessGroupGloo
    world: Any = distributed_c10d._get_default_group()
    devices = world._get_backend(torch.device("cpu")).options._devices

    class Sharing(original):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = original._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing


def _silence() -> None:
    """What the hosts print goes nowhere; errors travel with the results."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
