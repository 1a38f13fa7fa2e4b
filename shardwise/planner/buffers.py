"""Memory beside tensors of the model: communicators, buffers in which gradients are summed, copies in an update.

All functions take numbers or numpy arrays of candidates, but those of one rank's parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.planner.arrays import choose, smallest
from shardwise.planner.compute import product_weights, rank_parameters
from shardwise.planner.data import dense_and_expert
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import ENDS, Placed
from shardwise.spec.block import PartCosts
from shardwise.spec.cluster import ClusterSpec

# NCCL keeps three buffers for each neighbour and channel: 4 MiB (NCCL_BUFFSIZE), and in its low-latency protocols 0.5
# and 4.7 MiB (sizes in its sources). A ring and a tree have three neighbours.
_NEIGHBOUR_BYTES, _NEIGHBOURS = 9.2 * 2**20, 3
_HCCL_BYTES = 2 * 200e6  # of a communicator: HCCL_BUFFSIZE to send, and as much to receive


def communicator_bytes(layout: Layout, cluster: ClusterSpec) -> Any:
    """Bytes that the communication library keeps: for each axis above 1, and for all ranks where two axes are."""
    inside, between = _communicator_sizes(cluster)
    stride: Any = 1
    total: Any = 0.0
    axes: Any = 0
    for ranks in (layout.tp, layout.cp, layout.dp, layout.pp):
        stride = stride * ranks
        size = choose(stride <= cluster.devices_per_node, inside, between)
        total = total + choose(ranks > 1, size, 0.0)
        axes = axes + choose(ranks > 1, 1, 0)
    everyone = choose(stride <= cluster.devices_per_node, inside, between)
    total = total + choose(layout.ep > 1, everyone, 0.0)
    return total + choose(axes > 1, everyone, 0.0)


def _communicator_sizes(cluster: ClusterSpec) -> tuple[float, float]:
    """Bytes of a communicator in a node, and of one that leaves it."""
    if cluster.device_type == "npu":
        return _HCCL_BYTES, _HCCL_BYTES
    if cluster.device_type == "cpu":
        return 0.0, 0.0
    inside, between = (link.channels * _NEIGHBOURS * _NEIGHBOUR_BYTES for link in (cluster.links[0], cluster.links[-1]))
    return inside, between


def bucket_bytes(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    """Bytes of the buffer that gradients are copied into to be summed, where the software does so.

    What an allocator has kept of activations is in other pieces, so it counts beside them.
    """
    if not work.bucket_elements or layout.data_ranks == 1 or work.counted not in ("device", "allocator"):
        return 0.0
    trained = sum(dense_and_expert(parts, layout, trainable=True))
    return float(smallest(work.bucket_elements, trained) * work.sent_gradient_bytes)


def update_bytes(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    """Bytes of the largest weight that a rank updates, in fp32: what an update that is no single kernel makes."""
    if not work.copies_update:
        return 0.0
    dense, expert = dense_and_expert(parts, layout, trainable=True)
    share = layout.shard if layout.zero else 1
    updated = dense / share + expert / smallest(share, layout.expert_data_ranks)
    return 4.0 * min(float(updated), max(float(_largest_weight(part, layout, work)) for part, _, _ in parts))


def _largest_weight(part: PartCosts, layout: Layout, work: Work) -> Any:
    """Numbers of a part's largest weight on one rank; experts in one product are one weight."""
    if part.name in ENDS and not part.products:
        return rank_parameters(part.trainable, part, layout)
    sizes = [0.0]
    for product in part.products:
        if product.trainable:
            apart = product.copies / layout.ep if product.copies > 1 and work.expert_operators else 1
            sizes.append(product_weights(product, layout) / apart)
    return max(sizes)
