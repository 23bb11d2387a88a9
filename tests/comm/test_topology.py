"""Nodes of a process group from hosts or from ranks_per_node; irregular placements are flat, with the reason."""

import pytest
import torch.distributed as dist

from ext.comm import topology
from ext.comm.topology import Topology, discover, node_groups, topology_of
from ext.core.errors import ConfigError
from ext.testing.ranks import run_ranks


@pytest.mark.parametrize(
    ("ranks", "nodes", "per_node", "reason", "is_irregular"),
    [
        (range(4), "aabb", 2, "", False),
        (range(6), "aaabbb", 3, "", False),
        ([1, 3, 5, 7], "aabb", 2, "", False),
        (range(8), "aaaaaaaa", 8, "all on one node", False),
        (range(3), "abc", 1, "one rank per node", False),
        (range(5), "aaabb", 1, "unevenly placed: 3, 2 per node", True),
        (range(4), "abab", 1, "the ranks of a node are not consecutive", True),
        ([2, 0, 3, 1], "aabb", 1, "the group's ranks are not in ascending order", True),
    ],
)
def test_topology_of_placements(ranks, nodes, per_node, reason, is_irregular):
    found = topology_of(ranks, list(nodes))
    assert found == Topology(tuple(ranks), per_node, reason, is_irregular)
    assert found.is_two_level == (reason == "")
    if found.is_two_level:
        assert [found.node_of(i) for i in range(len(found.ranks))] == sorted(nodes.index(n) // per_node for n in nodes)


def _discover(rank: int, world_size: int) -> dict:
    hosts = {}
    odd = dist.new_group([1, 3])
    hosts["default"] = discover()
    hosts["config"] = discover(ranks_per_node=2)
    if rank in (1, 3):
        hosts["odd"] = discover(odd, ranks_per_node=2)
    with pytest.raises(ConfigError, match="ranks_per_node: 3 does not divide the world size 4"):
        discover(ranks_per_node=3)
    # The last rank says it runs elsewhere: two per node are then on two hosts.
    topology.socket.gethostname = lambda: "far" if rank == 3 else "near"
    with pytest.raises(ConfigError, match=r"puts ranks 2, 3 on one node, but they run on the hosts far, near"):
        discover(ranks_per_node=2)
    hosts["uneven"] = discover()
    if rank == 1:  # a group of its own: torch's count of groups then differs between the ranks
        dist.new_group([1], use_local_synchronization=True)
    flat, first = node_groups([hosts["uneven"], hosts["config"]] if rank else [hosts["config"], hosts["config"]])
    (again,) = node_groups([topology_of(range(4), list("aabb"))])
    assert first == again
    assert (flat is None) == (rank > 0)
    hosts["groups"] = (
        dist.get_process_group_ranks(first.intra_node),
        dist.get_process_group_ranks(first.inter_node),
    )
    return hosts


@pytest.mark.dist
def test_discover_on_real_ranks():
    results = run_ranks(_discover, 4)
    for rank, found in enumerate(results):
        assert found["default"].flat_reason == "all on one node"
        assert str(found["config"]) == "2 nodes of 2 ranks"
        assert found["uneven"].flat_reason == "unevenly placed: 3, 1 per node"
        assert found["groups"] == ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])
    assert results[1]["odd"].flat_reason == "one rank per node"
