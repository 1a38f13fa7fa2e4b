"""The tensor axis of a running job: one table for all ranks, found and proven before any weight is read."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from shardwise.errors import ShardwiseError
from shardwise.models.shrink import build_small, shrink
from shardwise.parallel.dropout import refuse_dropout_by_function
from shardwise.parallel.mesh import Mesh
from shardwise.tensor.find import find_table
from shardwise.tensor.group import ProcessTensorGroup
from shardwise.tensor.table import ShardingTable


def tensor_group(mesh: Mesh) -> ProcessTensorGroup | None:
    """This rank's end of the tensor axis, None at degree 1."""
    return None if mesh.size("tp") == 1 else ProcessTensorGroup(mesh.group("tp"))


def agree_on_table(model: PreTrainedModel, mesh: Mesh) -> ShardingTable:
    """The sharding table of ``model`` (whole, on meta): found once, by rank 0, and handed to all.

    Raises:
        PlanError: rank 0's refusal, on every rank.
    """
    degree = mesh.size("tp")
    if degree == 1:
        return ShardingTable(1)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = proven_table(model, degree, sequence=mesh.strategy.sequence_parallel)
        except ShardwiseError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ShardwiseError):
        raise box[0]
    table: ShardingTable = box[0]
    return table


def proven_table(model: PreTrainedModel, degree: int, *, sequence: bool = False) -> ShardingTable:
    """The table of ``model`` over ``degree`` ranks, found and proven on a small copy in this process.

    Args:
        sequence: whether the residual stream between blocks is cut along the sequence.

    Raises:
        PlanError: no small copy can be built, the split of it differs from the whole, dropout cannot be kept alike, or
            tokens of the residual stream depend on each other.
    """
    small = build_small(shrink(model.config, degree=degree))
    refuse_dropout_by_function(small, degree)
    return find_table(model, small, degree, sequence=sequence)
