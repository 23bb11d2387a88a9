"""Nodes of a process group from hosts or from ranks_per_node; irregular placements are flat, with the reason."""

import pytest
import torch.distributed as dist

from ext.comm import topology
from ext.comm.topology import Topology, rank_groups, topology_of
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
    world, odd = dist.group.WORLD, dist.new_group([1, 3])
    mine = [world, odd, None] if rank % 2 else [world]
    found = {"hosts": rank_groups(mine), "config": rank_groups(mine, ranks_per_node=2)}
    if rank == 1:  # a group of its own: torch's count of groups then differs between the ranks
        dist.new_group([1], use_local_synchronization=True)
    with pytest.raises(ConfigError, match="ranks_per_node: 3 does not divide the world size 4"):
        rank_groups([world], ranks_per_node=3)
    # The last rank says it runs elsewhere: two per node are then on two hosts.
    topology.socket.gethostname = lambda: "far" if rank == 3 else "near"
    with pytest.raises(ConfigError, match=r"puts ranks 2 to 3 on one node, but they run on the hosts far, near"):
        rank_groups([], ranks_per_node=2)
    found["uneven"] = rank_groups([world])
    topology.socket.gethostname = lambda: "abab"[rank]
    found["odd"] = rank_groups([odd] if rank % 2 else [])
    topology.socket.gethostname = lambda: "near"
    (again,) = rank_groups([world], ranks_per_node=2)
    nodes = found["config"][0].nodes
    assert nodes == again.nodes
    assert dist.get_process_group_ranks(nodes.intra_node) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(nodes.inter_node) == [rank % 2, rank % 2 + 2]
    assert nodes.inside.topology.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
    return {case: [str(group.topology) for group in groups] for case, groups in found.items()}


@pytest.mark.dist
def test_groups_of_real_ranks():
    for rank, found in enumerate(run_ranks(_discover, 4)):
        is_odd = rank % 2 == 1
        flat, alone = "2 ranks, all on one node", "1 ranks, all on one node"
        assert found["hosts"] == ["4 ranks, all on one node", *([flat, alone] if is_odd else [])]
        assert found["config"] == ["2 nodes of 2 ranks", *(["2 ranks, one rank per node", alone] if is_odd else [])]
        assert found["uneven"] == ["4 ranks, unevenly placed: 3, 1 per node"]
        assert found["odd"] == ([flat] if is_odd else [])
