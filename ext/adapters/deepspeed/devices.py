"""Which devices the ranks of a pipeline compute on."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def num_shared_devices(num_stages: int, environ: Mapping[str, str] = os.environ) -> float:
    """Devices that the ranks of one pipeline share; infinite where each has its own.

    On CPU a device is as many cores as a rank has threads. Ranks are taken to be spread evenly over machines.

    Args:
        num_stages: ranks of the pipeline.
        environ: where launchers leave the number of ranks of this machine.
    """
    accelerator: Any = get_accelerator()
    if accelerator.device_name() != "cpu":
        return math.inf
    given = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or ""
    num_ranks = int(given) if given.isdecimal() and int(given) else dist.get_world_size()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_devices = cores / torch.get_num_threads()
    return math.inf if num_devices >= num_ranks else num_devices * num_stages / num_ranks
