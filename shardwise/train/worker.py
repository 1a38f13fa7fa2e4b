"""``train(context)``: what one rank of a job does, from its files to its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.store import read_state
from shardwise.config import load_yaml
from shardwise.data.memory import MemoryData
from shardwise.parallel.mesh import build_mesh
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig
from shardwise.train.context import WorkerContext
from shardwise.train.memory import MemoryMeter
from shardwise.train.optim import Optimizer
from shardwise.train.saving import RunIdentity, TrainState, changes, find_checkpoint, lora_fingerprint, restore
from shardwise.train.setup import check_adapters, data_fingerprint, load_model, make_loader, read_rows
from shardwise.train.status import update_status
from shardwise.train.trainer import Trainer, TrainerParts


def train(context: WorkerContext) -> dict[str, Any]:
    """Train as ``run.yaml`` and ``plan.json`` in the output folder say.

    Returns:
        ``{"stopped": signal name}`` after a stop that the user asked for, else an empty dictionary.

    Raises:
        ShardwiseError: something that only shows with the weights or the data at hand.
    """
    run = parse_run(load_yaml(context.output_dir / "run.yaml"))
    plan = Plan.load(context.output_dir / "plan.json")
    stopped = make_trainer(run, plan, context).train()
    return {"stopped": stopped} if stopped else {}


def make_trainer(run: RunConfig, plan: Plan, context: WorkerContext, memory: MemoryData | None = None) -> Trainer:
    """The trainer of a run, where it begins or goes on; ``memory`` as for :func:`build_parts`."""
    parts = build_parts(run, plan, context, memory)
    return Trainer(parts, _start(parts))


def build_parts(run: RunConfig, plan: Plan, context: WorkerContext, memory: MemoryData | None = None) -> TrainerParts:
    """Rows first (a refusal costs no weights), then the model, then the optimizer.

    ``memory`` gives what a script holds instead of files.
    """
    device = torch.device(plan.device_type, context.local_rank) if plan.device_type != "cpu" else torch.device("cpu")
    mesh = build_mesh(plan.strategy, device)

    def say(text: str) -> None:
        if context.terminal is not None:
            print(text, file=context.terminal, flush=True)

    check_adapters(run)
    assert run.data.train is not None
    rows = read_rows(run.data.train, run, plan, say, memory)
    loader = make_loader(rows, run, plan, mesh)
    if loader.dropped_rows:
        say(f"data.drop_last: {loader.dropped_rows} of {len(rows)} rows are left out in each epoch")
    if len(rows) < plan.global_batch_size and not loader.dropped_rows:
        few = f"{len(rows)} rows are fewer than the global batch of {plan.global_batch_size}"
        say(f"data: {few}: each epoch is one step with all of them")
    eval_rows = read_rows(run.data.eval, run, plan, say, memory) if run.data.eval else None
    meter = MemoryMeter(device)
    loaded, plan = load_model(run, plan, mesh)
    if loaded.adapters is not None:
        say(f"LoRA      {loaded.adapters}")
    if context.rank == 0:
        plan.save(context.output_dir / "plan.json")
    return TrainerParts(
        run=run,
        context=context,
        loaded=loaded,
        optimizer=Optimizer(loaded.model.shards, run.train),
        loader=loader,
        eval_loader=make_loader(eval_rows, run, plan, mesh) if eval_rows is not None else None,
        identity=RunIdentity(
            plan.model.hash, run.train.optimizer, data_fingerprint(rows), lora_fingerprint(run, loaded.adapters)
        ),
        meter=meter,
    )


def _start(parts: TrainerParts) -> TrainState:
    """Where the run begins: at its start, or where the checkpoint that ``resume`` names stands (loaded in place)."""
    checkpoint = find_checkpoint(parts.run)
    if checkpoint is None:
        return TrainState()
    state = restore(checkpoint, parts.identity, parts.loaded.model, parts.optimizer)
    if parts.context.rank == 0:
        output_dir = parts.context.output_dir.resolve()
        name = checkpoint.resolve()
        inside = name.relative_to(output_dir) if name.is_relative_to(output_dir) else name
        update_status(output_dir, step=state.step, checkpoint=str(inside))
    terminal = parts.context.terminal
    if terminal is not None:
        print(f"resuming from {Path(checkpoint)} after step {state.step}", file=terminal, flush=True)
        for line in changes(read_state(checkpoint)["run"], parts.run):
            print(f"  changed {line}", file=terminal, flush=True)
    return state
