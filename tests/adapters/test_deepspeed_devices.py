"""How many devices the ranks of a machine share."""

import math
import os

import torch

from ext.adapters.deepspeed.devices import num_shared_devices


def test_ranks_share_cores_only_where_these_are_fewer(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert num_shared_devices(4, {"LOCAL_WORLD_SIZE": "4"}) == math.inf
    assert num_shared_devices(4, {"LOCAL_WORLD_SIZE": "8"}) == 2.0
    assert num_shared_devices(8, {"LOCAL_SIZE": "8"}) == 4.0
