"""Channels between two ranks: what is sent arrives, whatever shapes the step before had."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ext.core.errors import DataError
from ext.runtime.channels import Links
from ext.testing.ranks import run_ranks

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


def _message(spec: Any, fill: int) -> Any:
    """A tensor of a shape, or a tuple of them; the second carries no gradient."""
    if isinstance(spec, list):
        return tuple(torch.full(shape, float(fill + i)).requires_grad_(i == 0) for i, shape in enumerate(spec))
    return torch.full(spec, float(fill), requires_grad=True)


def _steps(rank: int, world_size: int, steps: list[list[Any]], dynamic: bool, lookahead: int) -> None:
    links = Links([0, 1], rank, [(0, 1)], CPU, dynamic=dynamic)
    for step in steps:
        links.reset_shapes()
        if rank == 0:
            for i, spec in enumerate(step):
                links.outputs_to(1).send(_message(spec, 10 * i), i)
            links.drain()
            continue
        receiver = links.inputs_from(0)
        for i in range(len(step) + lookahead):
            if i < len(step):
                receiver.post(i)
            if i >= lookahead:
                got, want = receiver.wait(i - lookahead), _message(step[i - lookahead], 10 * (i - lookahead))
                assert isinstance(got, tuple) == isinstance(want, tuple)
                pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
                for mine, theirs in pairs:
                    assert torch.equal(mine, theirs)
                    assert mine.requires_grad == theirs.requires_grad
    links.close()


@pytest.mark.parametrize("lookahead", [0, 3])
def test_shapes_that_change_between_steps(lookahead):
    a, b, pair, empty = (2, 3), (4, 3), [(2, 3), (5,)], (0, 3)
    specs = [a, a, b, a, pair, pair, a, empty, empty, pair, [(2, 3)], a, b]
    run_ranks(_steps, 2, [[spec] * 5 for spec in specs], False, lookahead)


def test_shapes_that_change_within_a_step():
    a, b = (2, 3), (4, 3)
    run_ranks(_steps, 2, [[a, b, b, a], [b, a], [a, a], [[a, b], a]], True, 2)


def _one_step_wrong(rank: int, world_size: int) -> None:
    links = Links([0, 1], rank, [(0, 1)], CPU, dynamic=False)
    if rank == 0:
        links.outputs_to(1).send(torch.ones(2, 3), 0)
        with pytest.raises(DataError, match=r"micro-batch 1: .* got \[4, 3\] float32, expected \[2, 3\] float32"):
            links.outputs_to(1).send(torch.ones(4, 3), 1)
        links.drain()
    else:
        links.inputs_from(0).post(0)
        links.inputs_from(0).wait(0)


def test_shapes_that_must_not_change():
    run_ranks(_one_step_wrong, 2)


def _messages_of_a_step(rank: int, world_size: int) -> list[int]:
    """Tensors that each step sends."""
    links = Links([0, 1], rank, [(0, 1)], CPU, dynamic=False)
    counts = []
    for shape in [(2, 3), (2, 3), (4, 3), (4, 3)]:
        links.reset_shapes()
        if rank == 0:
            sender = links.outputs_to(1)
            sender.send(torch.ones(shape), 0)
            counts.append(len(sender._unfinished))
            links.drain()
        else:
            links.inputs_from(0).post(0)
            posted = links.inputs_from(0)._posted[0]
            counts.append(len(posted.works))
            links.inputs_from(0).wait(0)
    return counts


def test_only_a_change_of_shapes_costs_a_stand_in():
    sent, posted = run_ranks(_messages_of_a_step, 2)
    assert sent == [2, 2, 3, 2]  # header and data, and the stand-in
    assert posted == [0, 1, 1, 1]  # data whose receive does not wait for the header


def _threads_of_links(rank: int, world_size: int) -> list[int]:
    """Threads of this process without channels, and with one, two and three pairs of them."""
    counts, opened = [], []
    for _ in range(4):
        counts.append(len(os.listdir("/proc/self/task")))
        opened.append(Links([0, 1], rank, [(0, 1)], CPU, dynamic=False))
    for links in opened:
        links.close()
    return counts


def test_channels_share_the_thread_that_polls():
    for none, one, two, three in run_ranks(_threads_of_links, 2):
        per_pair = three - two
        assert one - none == per_pair + 1
        assert two - one == per_pair
        assert per_pair == 2  # each communicator's own, which sleeps until a collective comes
