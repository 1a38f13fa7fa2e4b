"""What is different where the devices are processes of a CPU."""

from __future__ import annotations

from dataclasses import replace

from shardwise.planner.layout import Work
from shardwise.spec.cluster import ClusterSpec

_BASE_BYTES = 30 * 2**20


def on_cluster(work: Work, cluster: ClusterSpec) -> Work:
    """The work as the devices of ``cluster`` do it.

    CPU processes send with the cores that they compute with, so no traffic is hidden behind compute. What counts is
    their memory above what importing the libraries takes (``train/memory``).
    """
    if cluster.device_type != "cpu":
        return work
    return replace(work, overlap_data=False, base_bytes=_BASE_BYTES)
