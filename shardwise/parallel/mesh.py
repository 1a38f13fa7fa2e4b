"""The device mesh of a job, and the groups that its axes give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec.strategy import AXES, Strategy


@dataclass(frozen=True)
class Mesh:
    """This rank's place on every axis. Neighbouring ranks are neighbours on the tensor axis."""

    strategy: Strategy
    device: torch.device
    device_mesh: DeviceMesh

    def size(self, axis: str) -> int:
        return int(getattr(self.strategy, axis))

    def coordinate(self, axis: str) -> int:
        return int(self.device_mesh.get_local_rank(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.device_mesh.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Index of the rows that this rank sees, 0 .. dp - 1."""
        return self.coordinate("dp_replicate") * self.strategy.dp_shard + self.coordinate("dp_shard")

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.coordinate("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.coordinate("pp") == self.strategy.pp - 1

    @property
    def counts_loss(self) -> bool:
        """Of the ranks that know a loss (the last stage's tensor ranks all do), the one that reports it."""
        return self.is_last_stage and self.coordinate("tp") == 0


def build_mesh(strategy: Strategy, device: torch.device) -> Mesh:
    """The mesh of the default process group, whose size is ``strategy.world_size``."""
    shape = tuple(getattr(strategy, axis) for axis in AXES)
    return Mesh(strategy, device, init_device_mesh(device.type, shape, mesh_dim_names=AXES))
