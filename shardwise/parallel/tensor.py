"""The tensor axis of a running job: one table for all ranks, found and proven before any weight is read."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from shardwise.errors import PlanError, ShardwiseError
from shardwise.models.shrink import build_small, shrink
from shardwise.parallel.agreement import from_rank_0
from shardwise.parallel.dropout import refuse_dropout_by_function
from shardwise.parallel.mesh import Mesh
from shardwise.tensor.cache import TableCache
from shardwise.tensor.find import find_table
from shardwise.tensor.group import ProcessTensorGroup
from shardwise.tensor.table import ShardingTable

NO_TABLES = TableCache(None)


def tensor_group(mesh: Mesh) -> ProcessTensorGroup | None:
    """This rank's end of the tensor axis, None at degree 1."""
    return None if mesh.size("tp") == 1 else ProcessTensorGroup(mesh.group("tp"))


def agree_on_table(model: PreTrainedModel, mesh: Mesh, tables: TableCache = NO_TABLES) -> ShardingTable:
    """The sharding table of ``model`` (whole, on meta): found once, by rank 0, and handed to all.

    Args:
        tables: where rank 0 looks first, and keeps what it has found.

    Raises:
        PlanError: rank 0's refusal, on every rank.
    """
    degree = mesh.size("tp")
    if degree == 1:
        return ShardingTable(1)
    return from_rank_0(lambda: proven_table(model, degree, tables, sequence=mesh.strategy.sequence_parallel))


def proven_table(
    model: PreTrainedModel, degree: int, tables: TableCache = NO_TABLES, *, sequence: bool = False
) -> ShardingTable:
    """The table of ``model`` over ``degree`` ranks, found and proven on a small copy in this process, or before.

    Args:
        sequence: whether the residual stream between blocks is cut along the sequence.

    Raises:
        PlanError: no small copy can be built, the split of it differs from the whole, dropout cannot be kept alike, or
            tokens of the residual stream depend on each other.
    """
    known = tables.find(model.config, degree, sequence=sequence)
    if known is not None:
        return known
    reason = ""
    for dtype in (torch.float64, torch.float32):  # some forwards know no float64
        try:
            small = build_small(shrink(model.config, degree=degree), dtype)
            refuse_dropout_by_function(small, degree)
            table = find_table(model, small, degree, sequence=sequence)
        except ShardwiseError:
            raise
        except Exception as error:  # whatever a foreign forward raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            tables.keep(model.config, table, sequence=sequence)
            return table
    rule = f"no split of {type(model).__name__} was found ({reason})"
    raise PlanError(f"strategy.tp = {degree}", rule, "Use tp=1, and pp or dp_shard in its place")
