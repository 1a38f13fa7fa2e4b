"""What is different where the devices are processes of a CPU: traffic that takes cores, and what memory counts.

Memory is that of a process above what importing the libraries takes, as ``train/memory`` measures it: what tensors
hold, and what the heap keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.planner.layout import Layout, Work
from shardwise.spec.cluster import ClusterSpec

# Of a process whose model is as good as empty, after some steps: threads, connections, gloo's buffers. Measured: 7 to
# 14 MiB, with one to four processes, under every axis.
_BASE_BYTES = 12 * 2**20
# The heap keeps what a step frees, and little of it fits what is allocated next: a rank grows to more than it holds at
# any moment. Share of what comes and goes in a step, gradients too; measured on 30 plans of two small models, most of
# them between 0.2 and 0.5. Under sequence parallelism pieces and whole sequences alternate, and it is more.
# Processes that gather weights keep pieces below 8 MiB alone (``launch/heap``), which is much where blocks are smaller.
_HEAP, _HEAP_OF_SEQUENCES, _HEAP_BESIDE_GATHERS, _HEAP_OF_GATHERS = 0.33, 0.6, 0.25, 0.8
KEPT_BESIDE_GATHERS = 2**23
_COMING_AND_GOING = ("gradients", "activations", "logits", "workspace", "gathered")


def on_cluster(work: Work, cluster: ClusterSpec) -> Work:
    """The work as the devices of ``cluster`` do it.

    CPU processes send with the cores that they compute with, so no traffic is hidden behind compute.
    """
    if cluster.device_type != "cpu":
        return work
    return replace(work, overlap_data=False, counted="process", base_bytes=_BASE_BYTES)


def heap_share(layout: Layout) -> float:
    """Bytes that the heap keeps for each byte that comes and goes."""
    if layout.zero:
        return _HEAP_BESIDE_GATHERS
    return _HEAP_OF_SEQUENCES if layout.sequence_parallel else _HEAP


def heap_bytes(terms: Mapping[str, Any], layout: Layout, block_bytes: float) -> float:
    """What a process keeps of memory that it has freed, from the terms of what tensors hold.

    Args:
        block_bytes: weights of the largest block as it is gathered.
    """
    small = layout.zero and block_bytes < KEPT_BESIDE_GATHERS
    return (_HEAP_OF_GATHERS if small else heap_share(layout)) * float(sum(terms[name] for name in _COMING_AND_GOING))
