"""Communicators of two neighbouring pipeline ranks."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_OPEN_TIMEOUT = timedelta(minutes=30)


def open_pair(ranks: tuple[int, int], label: str, device: torch.device) -> Any:
    """A communicator that the two ranks create by themselves.

    ``torch.distributed.new_group`` is collective over the world, or names a group after the number of groups
    the rank already has, which differs between the ranks of a pipeline. Both ends count the pair's
    communicators instead.
    """
    key = (ranks, label)
    _num_opened[key] = count = _num_opened.get(key, 0) + 1
    name = f"ext/{label}/{ranks[0]}-{ranks[1]}/{count}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # pyright: ignore[reportPrivateImportUsage]
    me = ranks.index(dist.get_rank())
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, me, 2, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, me, 2, _gloo_options())


_num_opened: dict[tuple[tuple[int, int], str], int] = {}


def _gloo_options() -> Any:
    """For a group of point-to-point messages. All share one thread, which wakes a hundred times a second."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices, options._threads, options._timeout = _gloo_devices(), 1, _OPEN_TIMEOUT
    return options


@cache
def _gloo_devices() -> Any:
    """What gloo chooses for any group of this process, by GLOO_SOCKET_IFNAME or the host's name."""
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, _OPEN_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
    return alone.options._devices  # pyright: ignore[reportAttributeAccessIssue]
