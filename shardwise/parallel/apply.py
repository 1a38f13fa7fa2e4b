"""``parallelize``: one ordered list of steps from a model on meta to this rank's part of it."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from shardwise.models.build import materialise, recompute_buffers
from shardwise.models.lora import Adapters, inject
from shardwise.models.routers import Routers, take_routers
from shardwise.models.shard import Shard
from shardwise.models.structure import find_structure, num_predicted
from shardwise.parallel.balance import Balance
from shardwise.parallel.compiled import compile_blocks
from shardwise.parallel.deferred import DeferredWeights
from shardwise.parallel.draws import refuse_skipped_blocks
from shardwise.parallel.dropout import DropoutStreams, install_dropout
from shardwise.parallel.fsdp import apply_fsdp, settle_gradients
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.pipeline import Stage, cut_stages, tied_group
from shardwise.parallel.precision import make_shards, set_stored_dtypes
from shardwise.parallel.recompute import apply_recompute
from shardwise.parallel.tensor import NO_TABLES, agree_on_table, tensor_group
from shardwise.spec.layout import ParamLayout
from shardwise.spec.schedule import splits_backward
from shardwise.tensor.cache import TableCache
from shardwise.tensor.execute import apply_table
from shardwise.tensor.positions import Positions
from shardwise.tensor.table import ShardingTable, Style


def parallelize(
    model: PreTrainedModel,
    mesh: Mesh,
    adapters: Adapters | None = None,
    seed: int = 0,
    *,
    compiled: bool = False,
    tables: TableCache = NO_TABLES,
    given: ShardingTable | None = None,
) -> tuple[ParallelModel, ShardingTable]:
    """Split a model that is on the meta device; every step is a no-op at degree 1.

    The order matters: adapters and cuts change modules, so they come before the split of weights;
    compilation and recomputation wrap blocks inside of what FSDP hooks around them; memory is taken last, for this
    rank's slices alone.

    Args:
        adapters: what is added to the model and trained in its place, None to train all of it.
        seed: of dropout.
        compiled: whether blocks are compiled.
        tables: where the sharding table is looked for first, and kept.
        given: the sharding table of a plan, in its place.

    Returns:
        The parallel model with uninitialised weights (buffers are filled) and the sharding table used.

    Raises:
        PlanError: a structure or a module that this strategy cannot split.
    """
    compute_dtype = model.dtype
    refuse_skipped_blocks(model, mesh)
    structure = find_structure(model)
    num_logits = num_predicted(model)
    table = agree_on_table(model, mesh, tables, given)
    routers = take_routers(model)
    inject(model, adapters)
    stages, shards = [], []
    for stage, layouts in cut_stages(model, structure, mesh, table):
        stages.append(stage)
        stage.dropout = DropoutStreams(seed, mesh, stage.index)
        shards += _split_stage(stage, stage.dropout, layouts, mesh, table, routers, compute_dtype, compiled)
        if stage.deferred is not None and stage.is_last:
            stage.deferred.leave_out(stage.model.get_submodule(structure.head))
    split_logits = table.style(structure.head) is Style.VOCAB_HEAD
    tied = tied_group(structure, mesh)
    whole = ParallelModel(stages, shards, mesh, tied, compute_dtype, num_logits=num_logits, split_logits=split_logits)
    return whole, table


def _split_stage(
    stage: Stage,
    dropout: DropoutStreams,
    layouts: dict[str, ParamLayout],
    mesh: Mesh,
    table: ShardingTable,
    routers: Routers | None,
    compute_dtype: torch.dtype,
    compiled: bool,
) -> list[Shard]:
    """The steps behind the cut, on one stage of this rank; its shards, in memory."""
    model, group = stage.model, tensor_group(mesh)
    positions = None if group is None or table.sequence is None else Positions(group)
    layouts = apply_table(model, table, group, layouts, positions)
    if routers is not None:
        stage.balance = Balance(model, stage.blocks, routers, positions)
    install_dropout(model, stage.blocks, table, mesh, dropout, positions)
    compile_blocks(stage.blocks, mesh.device, compiled)
    if splits_backward(mesh.strategy.schedule, stage.index):
        stage.deferred = DeferredWeights(partial(settle_gradients, stage))
    apply_recompute(stage.blocks, mesh.strategy.recompute, dropout, stage.deferred)
    whole = set_stored_dtypes(model, compute_dtype, mesh)
    layouts = apply_fsdp(stage, stage.blocks, mesh, layouts, compute_dtype, whole)
    materialise(stage, mesh.device)
    recompute_buffers(model)
    return make_shards(model, layouts, compute_dtype)
