"""Devices, links and clusters as numbers, with presets; all sizes in bytes, all rates per second."""

from __future__ import annotations

import re

from pydantic import Field

from ext.core.errors import ConfigError, nearest
from ext.core.model import StrictModel

GIB = 2**30


class Link(StrictModel):
    """One direction of a connection between two ranks.

    Attributes:
        bandwidth: achievable bytes per second (bus bandwidth for collectives).
        latency: seconds per message or ring step.
    """

    bandwidth: float = Field(gt=0)
    latency: float = Field(default=0.0, ge=0)


class Device(StrictModel):
    """One accelerator.

    Attributes:
        flops: peak dense 16-bit floating-point operations per second.
        memory_bandwidth: peak bytes per second of the device's memory.
        memory_bytes: size of that memory.
        flops_efficiency: share of ``flops`` that large matrix products reach.
        memory_efficiency: share of ``memory_bandwidth`` that elementwise kernels reach.
        host_link: to the host's memory, for offload.
    """

    flops: float = Field(gt=0)
    memory_bandwidth: float = Field(gt=0)
    memory_bytes: int = Field(gt=0)
    flops_efficiency: float = Field(default=0.5, gt=0, le=1)
    memory_efficiency: float = Field(default=0.8, gt=0, le=1)
    host_link: Link = Link(bandwidth=24e9, latency=10e-6)

    def compute_time(self, flops: float) -> float:
        """Seconds of a compute-bound kernel of ``flops`` operations."""
        return flops / (self.flops * self.flops_efficiency)

    def memory_time(self, num_bytes: float) -> float:
        """Seconds of a memory-bound kernel that reads and writes ``num_bytes`` in all."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)


class Cluster(StrictModel):
    """Nodes of equal devices.

    Attributes:
        num_nodes: number of nodes.
        devices_per_node: accelerators of one node.
        intra_node: link between two devices of one node.
        inter_node: link between two nodes, per device.
    """

    device: Device
    num_nodes: int = Field(gt=0)
    devices_per_node: int = Field(gt=0)
    intra_node: Link
    inter_node: Link

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def link(self, group_size: int) -> Link:
        """The slowest link inside a group of ``group_size`` neighbouring ranks."""
        return self.intra_node if group_size <= self.devices_per_node else self.inter_node


NVLINK = Link(bandwidth=230e9, latency=5e-6)
"""Bus bandwidth of an all-reduce over eight NVLink 3 devices."""
PCIE = Link(bandwidth=14e9, latency=10e-6)
"""Bus bandwidth of an all-reduce over PCIe 4 x16 without a switch between the devices."""
_INFINIBAND = Link(bandwidth=20e9, latency=5e-6)
_INFINIBAND_NDR = Link(bandwidth=45e9, latency=5e-6)

DEVICES: dict[str, Device] = {
    # Peak figures of the makers' data sheets (dense, 16 bit).
    "v100-32gb": Device(flops=125e12, memory_bandwidth=0.9e12, memory_bytes=32 * GIB),
    "a100-40gb": Device(flops=312e12, memory_bandwidth=1.555e12, memory_bytes=40 * GIB),
    "a100-80gb": Device(flops=312e12, memory_bandwidth=2.0e12, memory_bytes=80 * GIB),
    "h100-80gb": Device(flops=989e12, memory_bandwidth=3.35e12, memory_bytes=80 * GIB),
    "h200-141gb": Device(flops=989e12, memory_bandwidth=4.8e12, memory_bytes=141 * 10**9),
}

_NODE_LINKS: dict[str, tuple[Link, Link]] = {
    "v100-32gb": (Link(bandwidth=130e9, latency=5e-6), Link(bandwidth=10e9, latency=5e-6)),
    "a100-40gb": (NVLINK, _INFINIBAND),
    "a100-80gb": (NVLINK, _INFINIBAND),
    "a100-40gb-pcie": (PCIE, Link(bandwidth=10e9, latency=5e-6)),
    "a100-80gb-pcie": (PCIE, Link(bandwidth=10e9, latency=5e-6)),
    "h100-80gb": (Link(bandwidth=360e9, latency=5e-6), _INFINIBAND_NDR),
    "h200-141gb": (Link(bandwidth=360e9, latency=5e-6), _INFINIBAND_NDR),
}


def preset(text: str) -> Cluster:
    """The cluster written as ``name:nodes x devices``, for example ``a100-80gb:8x8`` or ``a100-80gb-pcie:2x4``.

    Raises:
        ConfigError: unknown name, or the size is missing or malformed.
    """
    match = re.fullmatch(r"([a-z0-9-]+):([1-9]\d*)x([1-9]\d*)", text)
    name = match[1] if match else text.partition(":")[0]
    if name not in _NODE_LINKS:
        known = ", ".join(sorted(_NODE_LINKS))
        raise ConfigError(f"unknown cluster preset '{name}'.{nearest(name, _NODE_LINKS)} Known: {known}.")
    if match is None:
        raise ConfigError(f"cluster preset '{text}' has no size. Write nodes x devices per node: {name}:8x8.")
    intra_node, inter_node = _NODE_LINKS[name]
    return Cluster(
        device=DEVICES[name.removesuffix("-pcie")],
        num_nodes=int(match[2]),
        devices_per_node=int(match[3]),
        intra_node=intra_node,
        inter_node=inter_node,
    )
