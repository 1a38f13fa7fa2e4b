"""The tensor axis of a running job: one table for all ranks, found and proven before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.errors import PlanError, ShardwiseError
from shardwise.models.shrink import build_small, shrink
from shardwise.parallel.agreement import from_rank_0
from shardwise.parallel.draws import refuse_draws
from shardwise.parallel.mesh import Mesh
from shardwise.tensor.cache import TableCache
from shardwise.tensor.edited import REMEDY, VALUE, check_edited, same_split
from shardwise.tensor.find import find_table
from shardwise.tensor.group import ProcessTensorGroup
from shardwise.tensor.table import ShardingTable

NO_TABLES = TableCache(None)


def tensor_group(mesh: Mesh) -> ProcessTensorGroup | None:
    """This rank's end of the tensor axis, None at degree 1."""
    return None if mesh.size("tp") == 1 else ProcessTensorGroup(mesh.group("tp"))


def agree_on_table(
    model: PreTrainedModel, mesh: Mesh, tables: TableCache = NO_TABLES, given: ShardingTable | None = None
) -> ShardingTable:
    """The sharding table of ``model`` (whole, on meta): found once, by rank 0, and handed to all.

    Args:
        tables: where rank 0 looks first, and keeps what it has found.
        given: the table of a plan, which is proven in the place of the search.

    Raises:
        PlanError: rank 0's refusal, on every rank.
    """
    degree = mesh.size("tp")
    if degree == 1:
        return ShardingTable(1)
    sequence, whole = mesh.strategy.sequence_parallel, mesh.strategy.tp_whole
    if given is not None:
        return from_rank_0(lambda: proven_given(model, given, degree, tables, sequence=sequence, whole=whole))
    return from_rank_0(lambda: proven_table(model, degree, tables, sequence=sequence, whole=whole))


def proven_table(
    model: PreTrainedModel,
    degree: int,
    tables: TableCache = NO_TABLES,
    *,
    sequence: bool = False,
    whole: float | None = None,
) -> ShardingTable:
    """The table of ``model`` over ``degree`` ranks, found and proven on a small copy in this process, or before.

    Args:
        sequence: whether the residual stream between blocks is cut along the sequence.
        whole: the share of the blocks' parameters that may stay whole for less traffic; None: as little as can be.

    Raises:
        PlanError: no small copy can be built, its split differs from the whole, random numbers cannot be kept alike,
            tokens of the residual stream depend on each other, or no table leaves as little whole.
    """
    known = tables.find(model.config, degree, sequence=sequence, whole=whole)
    if known is not None:
        return known
    table = on_small_copy(model, degree, lambda small: find_table(model, small, degree, sequence=sequence, whole=whole))
    tables.keep(model.config, table, sequence=sequence, whole=whole)
    return table


def proven_given(
    model: PreTrainedModel,
    given: ShardingTable,
    degree: int,
    tables: TableCache,
    *,
    sequence: bool = False,
    whole: float | None = None,
) -> ShardingTable:
    """A plan's table, proven as a found one is; at once where it is the one that was found before.

    Raises:
        PlanError: it is for another degree, or :func:`shardwise.tensor.edited.check_edited` refuses it.
    """
    if given.degree != degree or (given.sequence is not None) != sequence:
        rule = f"is for tp = {given.degree}, sequence_parallel = {str(given.sequence is not None).lower()}"
        raise PlanError(VALUE, f"{rule}, and the plan's strategy is another", REMEDY)
    known = tables.find(model.config, degree, sequence=sequence, whole=whole)
    if known is not None and same_split(known, given):
        return known
    return on_small_copy(model, degree, lambda small: check_edited(model, small, given, whole))


def on_small_copy(
    model: PreTrainedModel, degree: int, make: Callable[[PreTrainedModel], ShardingTable], config: Any = None
) -> ShardingTable:
    """What ``make`` finds with a small copy of ``model``, that of ``config`` where one is given.

    Raises:
        PlanError: what ``make`` refuses, or no forward of the copy runs.
    """
    reason = ""
    for dtype in (torch.float64, torch.float32):  # some forwards know no float64
        try:
            small = build_small(shrink(model.config, degree=degree) if config is None else config, dtype)
            refuse_draws(small, degree)
            return make(small)
        except ShardwiseError:
            raise
        except Exception as error:  # whatever a foreign forward raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
    rule = f"no split of {type(model).__name__} was found ({reason})"
    raise PlanError(f"strategy.tp = {degree}", rule, "Use tp=1, and pp or dp_shard in its place")
