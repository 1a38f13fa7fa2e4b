"""``work(context)``: what one rank of a check does: its part of the small copy, beside one process's numbers.

Rank 0 makes the copy and the reference first. Each rank compares what it holds; rank 0 writes what came of it.
"""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from shardwise.check.findings import GradientPart, RankFindings, summarise
from shardwise.check.layouts import NUM_STEPS, num_micro_batches, num_stages, small_strategy
from shardwise.check.names import LAYOUT, PLAN, REPORT, RUN
from shardwise.check.outputs import Outputs, RankView, output_errors
from shardwise.check.reference import LEARNING_RATE, Reference, precision, recorded, run_reference
from shardwise.check.small import PACK_LENGTH, SmallModel, build_meta, make_rows, shrink_run
from shardwise.config import load_yaml
from shardwise.data.batch import Batch
from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.order import rank_bounds
from shardwise.data.rows import Row
from shardwise.models.shard import take
from shardwise.parallel.agreement import from_rank_0
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.model import ParallelModel
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig
from shardwise.spec.strategy import Strategy
from shardwise.tensor.cache import TableCache
from shardwise.train.context import WorkerContext
from shardwise.train.optim import Optimizer
from shardwise.train.step import train_step
from shardwise.units import format_count

_REFERENCE = "reference.pt"


def work(context: WorkerContext) -> dict[str, Any]:
    """Run the layout in the context's folder on the small copy, and write what came of it.

    Raises:
        ShardwiseError: rank 0's refusal, on every rank.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    folder = context.output_dir
    run, plan = parse_run(load_yaml(folder / RUN)), Plan.load(folder / PLAN)
    request = json.loads((folder / LAYOUT).read_text(encoding="utf-8"))
    degrees: dict[str, int] = request["degrees"]
    tables = TableCache(Path(request["tables"]) if request["tables"] else None)
    small = _agree(run, plan, degrees, folder, tables)
    strategy = small_strategy(plan, degrees, small.num_blocks)
    want: Reference = torch.load(folder / _REFERENCE, weights_only=False)
    findings = compare_rank(run, small, strategy, want, _global_batch_size(plan, strategy), tables)
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, findings)
    if context.rank == 0:
        summary = summarise(everyone, want, small.notes) | {"copy": _describe(small, want)}
        (folder / REPORT).write_text(json.dumps(summary), encoding="utf-8")
    return {}


def _describe(small: SmallModel, want: Reference) -> str:
    size = format_count(sum(values.numel() for values in want.state.values()))
    adapters = "" if small.adapters is None else f", adapters on {len(small.adapters.targets)} modules"
    name = type(build_meta(small.config, want.dtype)).__name__
    return f"{name} with {small.num_blocks} blocks, {size} parameters{adapters}"


def _global_batch_size(plan: Plan, strategy: Strategy) -> int:
    return strategy.dp * strategy.micro_batch_size * num_micro_batches(plan)


def _agree(run: RunConfig, plan: Plan, degrees: dict[str, int], folder: Path, tables: TableCache) -> SmallModel:
    """The small copy on every rank; rank 0 makes it, and the reference."""

    def make() -> SmallModel:
        small = shrink_run(run, plan.strategy.tp, degrees["tp"], num_stages(plan.strategy, degrees), tables)
        strategy = small_strategy(plan, degrees, small.num_blocks)
        steps = _steps(small, _global_batch_size(plan, strategy))
        torch.save(run_reference(small, steps, run.train), folder / _REFERENCE)
        return small

    return from_rank_0(make)


def _rows(small: SmallModel, global_batch_size: int) -> list[Row]:
    """All steps but the last are full; that has one row, so that some ranks have none."""
    return make_rows((NUM_STEPS - 1) * global_batch_size + 1, small.vocab_size)


def _steps(small: SmallModel, global_batch_size: int) -> list[list[Row]]:
    rows = _rows(small, global_batch_size)
    return [rows[start : start + global_batch_size] for start in range(0, len(rows), global_batch_size)]


def compare_rank(
    run: RunConfig,
    small: SmallModel,
    strategy: Strategy,
    want: Reference,
    global_batch_size: int,
    tables: TableCache,
) -> RankFindings:
    """Train this rank's part of the copy under ``strategy`` and compare it with the same steps in one process."""
    mesh = build_mesh(strategy, torch.device("cpu"))
    with precision(want.dtype):
        whole = build_meta(small.config, want.dtype)
        model, table = parallelize(whole, mesh, small.adapters, run.train.seed, tables=tables, given=small.table)
        for shard in model.shards:
            shard.data.copy_(take(want.state[shard.layout.source], shard.layout))
        batches = _loader(small, mesh, global_batch_size).batches()
        first = next(batches)
        outputs: Outputs = {}
        with ExitStack() as stack:
            for stage in model.stages if not small.packed else ():  # one process has them row by row
                stack.enter_context(recorded(stage.model, outputs))
            gradients = _first_gradients(model, first, want)
        optimizer = Optimizer(model.shards, run.train)
        losses, norms = [], []
        for step in range(NUM_STEPS):
            batch = first if step == 0 else next(batches)
            result = train_step(model, optimizer, batch, LEARNING_RATE, run.train.max_grad_norm, [])
            losses.append(result.loss)
            norms.append(result.grad_norm)
    start, stop = rank_bounds(first.num_rows, mesh.data_rank, strategy.dp)
    lengths = [len(row.input_ids) for row in _rows(small, global_batch_size)[start:stop]]
    view = RankView(table, mesh.coordinate("tp"), start, lengths, strategy.micro_batch_size)
    errors: dict[str, float] = {}
    for stage in model.stages:
        errors |= output_errors(stage.model, outputs, want.outputs, view)
    return RankFindings(losses, norms, gradients, errors)


def _first_gradients(model: ParallelModel, batch: Batch, want: Reference) -> list[GradientPart]:
    """How far each slice of the first step's gradient is from the same slice of one process's."""
    real = batch.lengths, batch.num_input_tokens
    model.forward_backward(batch.input_ids, batch.targets, batch.position_ids, batch.num_tokens, real)
    parts = []
    for shard in model.shards:
        if shard.parameter.requires_grad:
            expected = take(want.gradients[shard.layout.source], shard.layout)
            difference = expected if shard.grad is None else shard.grad - expected
            parts += [
                GradientPart(shard.layout.source, float(difference[piece.local_slices].norm()), piece.owned)
                for piece in shard.layout.pieces
            ]
    model.zero_grad()
    return parts


def _loader(small: SmallModel, mesh: Mesh, global_batch_size: int) -> Loader:
    strategy = mesh.strategy
    settings = LoaderSettings(
        global_batch_size,
        strategy.micro_batch_size,
        mesh.data_rank,
        strategy.dp,
        strategy.pp,
        shuffle=False,
        packing=small.packed,
        pack_length=PACK_LENGTH,
    )
    return Loader(_rows(small, global_batch_size), settings)
