"""Two nodes on one machine, joined by a link of a given rate: network namespaces, a veth pair and ``tc tbf``.

The kernel itself holds packets back, so a slow link costs no processor time, as the relay's does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_network import DEVICE, NoEmulatedNetwork, run_command

_QUEUE_BYTES = 2**26  # nothing is dropped: what is too early waits


@contextmanager
def shaped_link(mbit: float) -> Iterator[list[str]]:
    """The names of two namespaces, which processes enter with `emulated_network.enter`; removed at the end.

    Args:
        mbit: rate of the link, each way; `set_rate` changes it.

    Raises:
        NoEmulatedNetwork: no root, no `ip`, no `tc`, or a kernel without namespaces or tbf.
    """
    names = [f"ext{os.getpid()}s{node}" for node in range(2)]
    made: list[str] = []
    try:
        for name in names:
            run_command("ip", "netns", "add", name)
            made.append(name)
        first, second = names
        peer = ("peer", "name", DEVICE, "netns", second)
        run_command("ip", "link", "add", DEVICE, "netns", first, "type", "veth", *peer)
        for node, name in enumerate(names):
            run_command("ip", "-n", name, "link", "set", "lo", "up")
            run_command("ip", "-n", name, "addr", "add", f"10.78.0.{node + 1}/24", "dev", DEVICE)
            run_command("ip", "-n", name, "link", "set", DEVICE, "up")
            set_rate(name, mbit)
        yield names
    finally:
        for name in made:
            run_command("ip", "netns", "del", name)


def set_rate(name: str, mbit: float) -> None:
    """Let the node of this name send so fast from now on; callable by any process of root's."""
    burst = max(2**16, int(mbit * 1e6 / 8 / 200))  # the kernel's clock must not be what limits it
    shape = ("tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES))
    run_command("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *shape)


__all__ = ["NoEmulatedNetwork", "set_rate", "shaped_link"]
