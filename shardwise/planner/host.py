"""What is different where the devices are processes of a CPU: traffic that takes cores, and what memory counts.

Memory is that of a process above what importing the libraries takes, as ``train/memory`` measures it: what tensors
hold, and what the heap keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.planner.arrays import choose, log2, smallest
from shardwise.planner.layout import HostWork, Layout, Work
from shardwise.spec.cluster import ClusterSpec

# Of a process whose model is as good as empty, after some steps: threads, connections, gloo's buffers. Measured: 7 to
# 14 MiB, with one to four processes, under every axis.
_BASE_BYTES = 12 * 2**20
# The heap keeps what a step frees, and little of it fits what is allocated next: a rank grows to more than it holds at
# any moment. Shares of what comes and goes that it keeps, fitted on measured plans of two small models ("deep" and
# "wide" of benchmarks/measured_plans) by least squares of relative errors about 2.5 % above what was measured, the
# middle of the limits: of gradients, of the activations of one pass where more passes follow, of what a backward pass
# leaves for its second half, of logits and workspace. Under sequence parallelism pieces and whole sequences alternate
# on each tensor rank. Tensor ranks have more threads that send, each with pieces of its own.
_OF_GRADIENTS, _OF_PASS, _OF_DEFERRED, _OF_SEQUENCES, _OF_OTHERS = 0.35, 0.6, 0.2, 0.3, 0.4
_TENSOR_BYTES = 11 * 2**20
# On the rank with the head a backward pass follows right behind each forward pass, so that what both free alternates in
# the heap: more for each micro-batch of a step, of which 8 are the most that were measured.
_HEAD_BYTES, _MOST_PASSES = 2.1 * 2**20, 8
# Processes that gather weights keep pieces below 8 MiB alone (``launch/heap``). Where a block is smaller, the buffers
# it is gathered to and summed in find no hole as large as they are, less and less with each time that it is gathered.
KEPT_BESIDE_GATHERS = 2**23
# Of a larger block the heap keeps what is smaller: its weights one by one.
_BUFFERS, _MORE_BUFFERS = 2.7, 0.8  # times the weights of all such blocks: at first, and for each doubling of the times
# Of the first share that is in buffers for sums, which are of what trains alone. Fitted is the whole, on models that
# train whole; divided as the fresh buffers of shardwise.planner.data are, 5 to 1.25.
_OF_SUMS = 0.8
_PIECES, _MORE_PIECES = 0.2, 0.4  # likewise; the "grouped" model is the one that they were fitted on


@dataclass(frozen=True)
class Freed:
    """Bytes of a rank that come and go beside the terms of its memory. Numbers may be arrays of candidates.

    Args:
        pass_bytes: activations of one pass of a stage; ``block_bytes`` weights of the largest block as it is gathered,
            ``blocks_bytes`` of all; ``trained_block_bytes`` and ``trained_bytes`` those of them that have gradients.
    """

    pass_bytes: Any
    block_bytes: Any = 0.0
    blocks_bytes: Any = 0.0
    trained_block_bytes: Any = 0.0
    trained_bytes: Any = 0.0


# Python between kernels takes the cores that compute, so it is part of every step: hooks of tensor ranks and of FSDP2,
# the pipeline's messages, which wake a process that another one kept from its core. Products find weights that caches
# have lost, where those that were timed alone find them there. Fitted on the same plans as the heap, 130 of two models
# on a quiet machine; everything else is as it was measured.
_HOST = HostWork(
    product=1.65, mapped=9.0, collective=135.0, gather=620.0, reduction=1000.0, stage_pass=1000.0, deferred=38.0
)


def on_cluster(work: Work, cluster: ClusterSpec) -> Work:
    """The work as the devices of ``cluster`` do it.

    CPU processes send with the cores that they compute with, so no traffic is hidden behind compute.
    """
    if cluster.device_type != "cpu":
        return work
    return replace(work, overlap_data=False, counted="process", base_bytes=_BASE_BYTES, host=_HOST)


def heap_bytes(terms: Mapping[str, Any], layout: Layout, freed: Freed, has_head: bool) -> float:
    """What a process keeps of memory that it has freed, beside the terms of what tensors hold."""
    held = heap_of_blocks(layout, terms["gradients"], freed)
    if layout.zero:  # buffers for sums come with the last pass, when activations of those before it are gone
        held = max(held - max(terms["activations"] - freed.pass_bytes, 0.0), 0.0)
    held = held + (heap_of_head(layout) if has_head else 0.0)
    return float(held + heap_of_others(layout, terms["logits"] + terms["workspace"]))


def heap_of_blocks(layout: Layout, gradients: Any, freed: Freed) -> Any:
    """What the heap keeps of blocks, in proportion to them. Numbers may be arrays of candidates.

    Args:
        gradients: bytes of them.
    """
    share = choose(layout.num_micro_batches > 1, _OF_PASS, 0.0)
    share = share + _OF_DEFERRED * (layout.schedule == "zero_bubble")
    share = share + _OF_SEQUENCES * layout.tp * layout.sequence_parallel
    if layout.zero:
        more = log2(_gathers(layout))
        small = freed.blocks_bytes * ((1 - _OF_SUMS) * _BUFFERS + _MORE_BUFFERS * more)
        large = freed.blocks_bytes * (_PIECES + _MORE_PIECES * more) + share * freed.pass_bytes
        sums = choose(freed.trained_block_bytes < KEPT_BESIDE_GATHERS, _OF_SUMS * _BUFFERS * freed.trained_bytes, 0.0)
        return sums + choose(freed.block_bytes < KEPT_BESIDE_GATHERS, small, large)
    return share * freed.pass_bytes + _OF_GRADIENTS * gradients


def heap_of_others(layout: Layout, num_bytes: Any) -> Any:
    """What the heap keeps of logits and workspace, and of what tensor ranks send."""
    return _OF_OTHERS * num_bytes + (_TENSOR_BYTES if layout.tp > 1 else 0.0)


def heap_of_head(layout: Layout) -> Any:
    """What the heap of the rank with the head keeps of passes that turn round there."""
    return _HEAD_BYTES * smallest(layout.num_micro_batches, _MOST_PASSES)


def _gathers(layout: Layout) -> Any:
    """How often a step gathers the weights of a block."""
    if layout.zero < 3:
        return 1
    return layout.num_micro_batches * choose(layout.pp > 1, 1, 2)
