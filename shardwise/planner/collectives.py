"""Time of collectives: latency and bytes on every level of links that a group spans.

Groups are given by size and stride: ranks ``first, first + stride, ...``. The groups of one axis run at the same
time, so a group that leaves a node uses the network cards of the members that it has there, and no others. All
functions take numbers or numpy arrays of candidates.
"""

from __future__ import annotations

from typing import Any

from shardwise.planner.arrays import choose, largest, log2, smallest
from shardwise.spec.block import CollectiveOp
from shardwise.spec.cluster import ClusterSpec, Link

_EVERY_DEVICE = 2**40


def collective_seconds(op: CollectiveOp, num_bytes: Any, ranks: Any, stride: Any, cluster: ClusterSpec) -> Any:
    """Seconds of one collective over ``ranks`` ranks.

    A ring sends (n - 1) / n of the tensor to gather or to scatter, twice that to reduce to all (Thakur et al. 2005,
    Optimization of Collective Communication Operations in MPICH). In an all-to-all each rank sends
    (n - 1) / n of what it holds, the part for other nodes over its own network card. Where the group fills its last
    node only in part, the members there have fewer cards to take the same traffic.

    Args:
        num_bytes: of the whole tensor: what a gather gives, what a reduction takes; for an all-to-all what one rank
            holds.
    """
    ranks = largest(ranks, 1)
    steps: Any = 0.0
    per_byte: Any = 0.0
    inside: Any = 1
    for link in cluster.links:
        members = largest(smallest((link.devices or _EVERY_DEVICE) // stride, ranks), inside)
        time = link.factors.get(op, 1.0) / _bandwidth(link, members)
        rest = ranks % inside
        fewest = choose(rest > 0, rest, inside)
        if op == "all_to_all":
            per_byte = largest(per_byte, choose(members > inside, (members - fewest) / ranks * time, 0.0))
        else:
            per_byte = largest(per_byte, choose(members > inside, time / fewest, 0.0))
        factor = link.factors.get(op, 1.0)
        further = members / inside - 1 if link.ring else log2(members / inside)
        steps = steps + factor * link.latency * further
        inside = members
    if op == "all_to_all":
        return steps + num_bytes * per_byte
    return (2 if op == "all_reduce" else 1) * (steps + num_bytes * (ranks - 1) / ranks * per_byte)


def send_seconds(num_bytes: float, first: int, second: int, cluster: ClusterSpec) -> float:
    """Seconds to hand a tensor from one device to another, both by their number in the cluster."""
    for link in cluster.links:
        if not link.devices or first // link.devices == second // link.devices:
            return float(link.send_seconds(num_bytes))
    raise AssertionError("the last link reaches every device")


def _bandwidth(link: Link, members: Any) -> Any:
    """Bytes/s of one member; a full mesh gives it a wire to each other one."""
    full = link.bandwidth * link.efficiency
    if not link.pair_bandwidth:
        return full
    return smallest(full, link.pair_bandwidth * link.efficiency * largest(members - 1, 1))
