"""Which ranks of a process group share a node, and the sub-groups inside and between nodes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ext.core.errors import ConfigError

_KEY = "ext.moe.topology.ranks_per_node"


@dataclass(frozen=True)
class Topology:
    """The nodes of one process group.

    Attributes:
        ranks: global ranks in the order of the group.
        ranks_per_node: how many consecutive ranks share a node; meaningful where ``flat_reason`` is empty.
        flat_reason: why an exchange in two hops is impossible or pointless; empty where it is possible.
        is_irregular: the reason is how the ranks were placed, not their number: worth a warning.
    """

    ranks: tuple[int, ...]
    ranks_per_node: int
    flat_reason: str = ""
    is_irregular: bool = False

    @property
    def is_two_level(self) -> bool:
        """Whether the group covers several whole nodes with several ranks each, one node after another."""
        return not self.flat_reason

    @property
    def num_nodes(self) -> int:
        return len(self.ranks) // self.ranks_per_node

    def node_of(self, index: int) -> int:
        """The node of the group's ``index``-th rank."""
        return index // self.ranks_per_node

    def __str__(self) -> str:
        if self.is_two_level:
            return f"{self.num_nodes} nodes of {self.ranks_per_node} ranks"
        return f"{len(self.ranks)} ranks, {self.flat_reason}"


@dataclass(frozen=True)
class NodeGroups:
    """The process groups of this rank: its node's ranks, and the ranks with its local index on all nodes."""

    topology: Topology
    intra_node: ProcessGroup
    inter_node: ProcessGroup

    @property
    def inside(self) -> RankGroup:
        """This rank's node as a group of its own."""
        m = self.topology.ranks_per_node
        first = self.topology.node_of(self.topology.ranks.index(dist.get_rank())) * m
        return RankGroup(self.intra_node, topology_of(self.topology.ranks[first : first + m], ["here"] * m))


@dataclass(frozen=True)
class RankGroup:
    """A process group with all that an exchange over it needs to know.

    Attributes:
        process_group: None where the group is this rank alone.
        topology: where its ranks live.
        nodes: its sub-groups; None where the topology is flat.
    """

    process_group: ProcessGroup | None
    topology: Topology
    nodes: NodeGroups | None = None

    @classmethod
    def alone(cls, rank: int = 0) -> RankGroup:
        """A group of one rank, which needs no process group."""
        return cls(None, topology_of([rank], ["here"]))

    @property
    def size(self) -> int:
        return len(self.topology.ranks)


def topology_of(ranks: Sequence[int], nodes: Sequence[str]) -> Topology:
    """The topology of a group whose ``ranks[i]`` lives on ``nodes[i]``. No communication."""
    ranks = tuple(ranks)
    names = list(dict.fromkeys(nodes))
    sizes = [list(nodes).count(name) for name in names]
    if len(names) == 1:
        return Topology(ranks, len(ranks), "all on one node")
    if max(sizes) == 1:
        return Topology(ranks, 1, "one rank per node")
    if len(set(sizes)) > 1:
        reason = f"unevenly placed: {', '.join(map(str, sizes))} per node"
    elif list(nodes) != [name for name in names for _ in range(sizes[0])]:
        reason = "the ranks of a node are not consecutive"
    elif list(ranks) != sorted(ranks):
        reason = "the group's ranks are not in ascending order"
    else:
        return Topology(ranks, sizes[0])
    return Topology(ranks, 1, reason, is_irregular=True)


def rank_groups(process_groups: Sequence[ProcessGroup | None], ranks_per_node: int | None = None) -> list[RankGroup]:
    """Topology and node groups of the process groups that this process belongs to, in the same order.

    Collective over the whole world, since torch names a group by the number of groups created before it: every
    process must call, those in no group with an empty list. Groups by node are created once and kept.

    Args:
        process_groups: any process groups; None stands for this rank alone.
        ranks_per_node: global ranks ``n * ranks_per_node`` onwards form node n, whatever the hosts say: for
            emulated nodes, or where a host holds several islands of fast links.

    Raises:
        ConfigError: on all ranks, where ``ranks_per_node`` differs between them, does not divide the world or joins
            hosts.
    """
    alone = RankGroup.alone(dist.get_rank())
    mine = [() if g is None else tuple(dist.get_process_group_ranks(g)) for g in process_groups]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), mine, ranks_per_node))
    _refuse_different([given for *_, given in everyone])
    nodes = _nodes([host for host, *_ in everyone], ranks_per_node)
    members = sorted({ranks for _, groups, _ in everyone for ranks in groups if len(ranks) > 1})
    topologies = {ranks: topology_of(ranks, [nodes[rank] for rank in ranks]) for ranks in members}
    _create([topologies[ranks] for ranks in members if topologies[ranks].is_two_level])
    return [
        alone if len(ranks) < 2 else RankGroup(group, topologies[ranks], _node_groups(topologies[ranks]))
        for group, ranks in zip(process_groups, mine, strict=True)
    ]


def _refuse_different(given: list[int | None]) -> None:
    """Nodes may read different config files."""
    if len(set(given)) > 1:
        each = ", ".join(f"{value or 'absent'} on rank {rank}" for rank, value in enumerate(given))
        raise ConfigError(f"{_KEY}: differs between ranks: {each}. Give all ranks one config.")


def _nodes(hosts: list[str], ranks_per_node: int | None) -> list[str]:
    """The node of every global rank."""
    if ranks_per_node is None:
        return hosts
    if ranks_per_node < 1 or len(hosts) % ranks_per_node:
        raise ConfigError(
            f"{_KEY}: {ranks_per_node} does not divide the world size {len(hosts)}. Give the number of ranks on "
            "each node, or leave the key out to use the ranks' hosts."
        )
    for first in range(0, len(hosts), ranks_per_node):
        names = sorted(set(hosts[first : first + ranks_per_node]))
        if len(names) > 1:
            raise ConfigError(
                f"{_KEY}: {ranks_per_node} puts ranks {first} to {first + ranks_per_node - 1} on one node, but they "
                f"run on the hosts {', '.join(names)}. Give the number of ranks on each host, or leave the key out."
            )
    return [str(rank // ranks_per_node) for rank in range(len(hosts))]


def _create(topologies: Sequence[Topology]) -> None:
    """Create the groups inside nodes, then those between nodes, on every process in the same order."""
    if _created.world is not dist.group.WORLD:  # an earlier world was destroyed, and its groups with it
        _created.world = dist.group.WORLD
        _created.groups.clear()
    for topology in topologies:
        ranks, m = key = (topology.ranks, topology.ranks_per_node)
        if key not in _created.groups:
            nodes = [list(ranks[first : first + m]) for first in range(0, len(ranks), m)]
            rails = [list(ranks[local::m]) for local in range(m)]
            _created.groups[key] = (_new_groups(nodes), _new_groups(rails))


def _node_groups(topology: Topology) -> NodeGroups | None:
    intra, inter = _created.groups.get((topology.ranks, topology.ranks_per_node), (None, None))
    return None if intra is None or inter is None else NodeGroups(topology, intra, inter)


def _new_groups(members: Sequence[list[int]]) -> ProcessGroup | None:
    """Create every group, on every process in the same order; this process's own."""
    mine = None
    for ranks in members:
        group = dist.new_group(ranks)
        if isinstance(group, ProcessGroup) and dist.get_rank() in ranks:
            mine = group
    return mine


class _Created:
    """The node groups of the running world, by key; None on processes outside of them."""

    def __init__(self) -> None:
        self.world: ProcessGroup | None = None
        self.groups: dict[tuple[tuple[int, ...], int], tuple[ProcessGroup | None, ProcessGroup | None]] = {}


_created = _Created()
