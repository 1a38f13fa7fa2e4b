"""``parallelize``: one ordered list of steps from a model on meta to this rank's part of it."""

from __future__ import annotations

from transformers import PreTrainedModel

from shardwise.models.build import materialise, recompute_buffers
from shardwise.models.lora import Adapters, inject
from shardwise.models.routers import take_routers
from shardwise.models.structure import find_structure
from shardwise.parallel.balance import Balance
from shardwise.parallel.compiled import compile_blocks
from shardwise.parallel.dropout import DropoutStreams, install_dropout
from shardwise.parallel.fsdp import apply_fsdp
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.pipeline import cut_stage, tied_group
from shardwise.parallel.precision import make_shards, set_stored_dtypes
from shardwise.parallel.recompute import apply_recompute
from shardwise.parallel.tensor import NO_TABLES, agree_on_table, tensor_group
from shardwise.tensor.cache import TableCache
from shardwise.tensor.execute import apply_table
from shardwise.tensor.table import ShardingTable, Style


def parallelize(
    model: PreTrainedModel,
    mesh: Mesh,
    adapters: Adapters | None = None,
    seed: int = 0,
    *,
    compiled: bool = False,
    tables: TableCache = NO_TABLES,
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

    Returns:
        The parallel model with uninitialised weights (buffers are filled) and the sharding table used.

    Raises:
        PlanError: a structure or a module that this strategy cannot split.
    """
    strategy, compute_dtype = mesh.strategy, model.dtype
    structure = find_structure(model)
    table = agree_on_table(model, mesh, tables)
    routers = take_routers(model)
    inject(model, adapters)
    stage, layouts = cut_stage(model, structure, mesh)
    layouts = apply_table(model, table, tensor_group(mesh), layouts)
    if routers is not None:
        stage.balance = Balance(model, stage.blocks, routers)
    stage.dropout = DropoutStreams(seed, mesh)
    install_dropout(model, table, mesh, stage.dropout)
    compile_blocks(stage.blocks, mesh.device, compiled)
    apply_recompute(stage.blocks, strategy.recompute, stage.dropout)
    set_stored_dtypes(model, compute_dtype, mesh)
    layouts = apply_fsdp(stage, stage.blocks, mesh, layouts, compute_dtype)
    materialise(stage, mesh.device)
    recompute_buffers(model)
    shards = make_shards(model, layouts, compute_dtype)
    split_logits = table.style(structure.head) is Style.VOCAB_HEAD
    parallel = ParallelModel(stage, shards, mesh, tied_group(structure, mesh), compute_dtype, split_logits=split_logits)
    return parallel, table
