"""Nodes on one machine: network namespaces joined by a relay that makes every packet between them cost time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ext.core.errors import ExtError

DEVICE = "eth0"
_RELAY = Path(__file__).with_name("relay.c")
_CLONE_NEWNET = 0x40000000
_MTU = 9000


class NoEmulatedNetwork(ExtError, RuntimeError):
    """This machine cannot make network namespaces."""


@contextmanager
def emulated_network(
    num_nodes: int, *, delay_us: float = 0, mbit: float = 0, packet_us: float = 0
) -> Iterator[list[str]]:
    """The names of one namespace per node, which processes enter with `enter`; removed at the end.

    Args:
        num_nodes: namespaces; node i has the address 10.77.0.(i+1).
        delay_us: how long every packet travels.
        mbit: rate at which a node sends; 0 for no limit.
        packet_us: time that a node takes per packet it sends.

    Raises:
        NoEmulatedNetwork: no root, no `ip`, no C compiler, or no /dev/net/tun.
    """
    names = [f"ext{os.getpid()}n{node}" for node in range(num_nodes)]
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        binary = str(Path(folder) / "relay")
        run_command("cc", "-O2", "-o", binary, str(_RELAY))
        made: list[str] = []
        relay = None
        try:
            for name in names:
                run_command("ip", "netns", "add", name)
                made.append(name)
            numbers = [str(number) for number in (delay_us, mbit, packet_us)]
            relay = subprocess.Popen([binary, *numbers, *names], stdout=subprocess.PIPE, text=True)
            assert relay.stdout is not None
            if relay.stdout.readline() != "ready\n":
                raise NoEmulatedNetwork("the relay did not start; it needs root and /dev/net/tun.")
            for node, name in enumerate(names):
                run_command("ip", "-n", name, "link", "set", "lo", "up")
                run_command("ip", "-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", DEVICE)
                run_command("ip", "-n", name, "link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "10000", "up")
            yield names
        finally:
            if relay is not None:
                relay.kill()
                relay.wait()
            for name in made:
                run_command("ip", "netns", "del", name)


def enter(name: str) -> None:
    """Move this process into a namespace; sockets it opens from now on belong to that node."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise NoEmulatedNetwork(f"cannot enter {name}: {os.strerror(ctypes.get_errno())}.")


def run_command(*command: str) -> None:
    """Run it, or say why this machine cannot.

    Raises:
        NoEmulatedNetwork: it is not installed, or fails.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoEmulatedNetwork(f"{command[0]} is not installed; it makes the emulated network.") from error
    except subprocess.CalledProcessError as error:
        raise NoEmulatedNetwork(f"{' '.join(command)}: {error.stderr.strip()}") from error
