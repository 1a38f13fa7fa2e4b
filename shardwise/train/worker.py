"""``train(context)``: what one rank of a job does, from its files to its export."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.listing import CHECKPOINTS, is_unlisted, saved_state, told_of_unlisted
from shardwise.config import load_yaml
from shardwise.data.loader import Loader
from shardwise.data.memory import MemoryData
from shardwise.files import replace_text
from shardwise.machine import available_cores
from shardwise.models.packing import check_packing
from shardwise.parallel.agreement import from_rank_0
from shardwise.parallel.compiled import has_dropout_layers
from shardwise.parallel.mesh import build_mesh
from shardwise.spec.compiling import compile_rule
from shardwise.spec.data_files import data_folder
from shardwise.spec.described import SIZES, DescriptionCache, description_folder
from shardwise.spec.learning_rate import check_schedule_length
from shardwise.spec.plan import Plan
from shardwise.spec.ranges import check_last_step, parse_steps
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig, dump_run, tracker_names
from shardwise.tensor.cache import TableCache, table_folder
from shardwise.train.callbacks import Callback
from shardwise.train.compiler_cache import CompilerCache
from shardwise.train.context import WorkerContext
from shardwise.train.data import DataReader
from shardwise.train.early_stopping import EarlyStopping
from shardwise.train.identity import RunIdentity, after_restart, check_order, chosen_checkpoint
from shardwise.train.memory import MemoryMeter
from shardwise.train.metrics import MetricsFile
from shardwise.train.optim import Optimizer
from shardwise.train.page import RunPage
from shardwise.train.predicted import PredictionReport
from shardwise.train.previous import ReplacesPrevious
from shardwise.train.profiling import StepProfiler
from shardwise.train.progress import ProgressView
from shardwise.train.restarts import TellsRestart
from shardwise.train.saving import TrainState, changes, intact_checkpoint, lora_fingerprint, restore
from shardwise.train.setup import Blueprint, LoadedModel, load_model, make_loader, within_tables
from shardwise.train.status import StatusFile
from shardwise.train.trackers import make_trackers
from shardwise.train.trainer import Trainer, TrainerParts, count_steps


def train(context: WorkerContext, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Train as ``run.yaml`` and ``plan.json`` in the output folder say.

    Args:
        callbacks: called after those of the run itself, in this order; the same ones on every rank.

    Returns:
        ``{"stopped": signal name}`` after a stop that the user asked for, else an empty dictionary.

    Raises:
        ShardwiseError: something that only shows with the weights or the data at hand.
    """
    run = parse_run(load_yaml(context.output_dir / "run.yaml"))
    if context.restart is not None:
        run = after_restart(run, context.output_dir)
    plan = Plan.load(context.output_dir / "plan.json")
    stopped = make_trainer(run, plan, context, callbacks=callbacks).train()
    return {"stopped": stopped} if stopped else {}


def make_trainer(
    run: RunConfig,
    plan: Plan,
    context: WorkerContext,
    memory: MemoryData | None = None,
    callbacks: Sequence[Callback] = (),
    compiler_available: bool | None = None,
) -> Trainer:
    """The trainer of a run, where it begins or goes on; the other arguments as for :func:`build_parts`."""
    view = ProgressView(context.terminal)
    parts = build_parts(run, plan, context, memory, compiler_available)
    state, checkpoint = _start(parts)
    cache = [CompilerCache(context.local_rank, os.environ)] if parts.run.train.compile else []
    told: list[Callback] = [TellsRestart(context.restart, view.say)] if context.restart is not None else []
    if plan.predicted:
        told.append(PredictionReport(plan.predicted, view.say))
    return Trainer(parts, state, view, [*run_callbacks(run, checkpoint, view.say), *told, *cache, *callbacks])


def run_callbacks(run: RunConfig, checkpoint: str | None, say: Callable[[str], None]) -> list[Callback]:
    """What the keys of a run switch on, the same on every rank; files first, so that nothing can keep them back."""
    patience = run.train.early_stopping_patience
    steps = parse_steps(run.log.profile_steps, "log.profile_steps")
    return [
        ReplacesPrevious(),
        MetricsFile(),
        StatusFile(checkpoint),
        *make_trackers(tracker_names(run), os.environ),
        *([StepProfiler(steps, say)] if steps else []),
        *([EarlyStopping(patience)] if patience is not None else []),
        RunPage(),
    ]


def build_parts(
    run: RunConfig,
    plan: Plan,
    context: WorkerContext,
    memory: MemoryData | None = None,
    compiler_available: bool | None = None,
) -> TrainerParts:
    """Rows first (a refusal costs no weights), then the model, then the optimizer.

    Args:
        memory: what a script holds instead of files.
        compiler_available: None: blocks are compiled as the run says; else the rule decides whether they are.
    """
    device = torch.device(plan.device_type, context.local_rank) if plan.device_type != "cpu" else torch.device("cpu")
    mesh = build_mesh(plan.strategy, device)

    def say(text: str) -> None:
        if context.terminal is not None:
            print(text, file=context.terminal, flush=True)

    blueprint = Blueprint(run)
    _ = blueprint.adapters  # those that do not fit the model are refused before rows are read
    plan = within_tables(plan, blueprint.model)
    if run.data.packing:
        from_rank_0(lambda: check_packing(blueprint.model, _capacity(run, plan)))
    assert run.data.train is not None
    reader = DataReader(run, plan, memory, data_folder(os.environ), available_cores(), say)
    rows, apart = reader.train_rows()
    identity = _checked_identity(run, plan, context, rows.fingerprint)
    loader = make_loader(rows, run, plan, mesh)
    steps = count_steps(run, loader, TrainState())
    check_last_step(parse_steps(run.log.profile_steps, "log.profile_steps"), steps, "log.profile_steps")
    check_schedule_length(run.train, steps)
    if compiler_available is not None:
        run = _compiled_by_rule(run, plan, steps, compiler_available, blueprint, say)
        if context.rank == 0:
            replace_text(context.output_dir / "run.yaml", dump_run(run))
    _say_what_becomes_of_rows(loader, say)
    eval_rows = reader.eval_rows() or apart
    meter = MemoryMeter(device)
    was_measured = plan.model.measured
    loaded, plan = load_model(run, plan, mesh, blueprint, TableCache(table_folder(os.environ)))
    _say_what_is_trained(run, loaded, say)
    if context.rank == 0:
        plan.save(context.output_dir / "plan.json")
        if not was_measured:  # the next start knows it without building anything
            DescriptionCache(description_folder(os.environ)).keep(plan.model.hash, SIZES, plan.model.to_json())
    return TrainerParts(
        run=run,
        plan=plan,
        context=context,
        loaded=loaded,
        optimizer=Optimizer(loaded.model.shards, run.train),
        loader=loader,
        eval_loader=make_loader(eval_rows, run, plan, mesh) if eval_rows is not None else None,
        identity=replace(identity, lora=lora_fingerprint(run, loaded.adapters)),
        meter=meter,
    )


def _checked_identity(run: RunConfig, plan: Plan, context: WorkerContext, data: str) -> RunIdentity:
    """What this run is; refuses a checkpoint of another, but for the adapters' places, which need the model."""
    identity = RunIdentity(plan.model.hash, run.train.optimizer, data)
    checkpoint = chosen_checkpoint(run, context.output_dir / CHECKPOINTS)
    if checkpoint is not None:
        saved = saved_state(checkpoint)
        identity.check(saved["identity"], checkpoint, ("model", "optimizer", "data"))
        check_order(saved, run, checkpoint)
    return identity


def _say_what_is_trained(run: RunConfig, loaded: LoadedModel, say: Callable[[str], None]) -> None:
    if loaded.adapters is not None:
        say(f"LoRA      {loaded.adapters}")
        if run.model_init == "random":
            say("          the base model is random and in no file: the adapter can be resumed, not loaded elsewhere")


def _say_what_becomes_of_rows(loader: Loader, say: Callable[[str], None]) -> None:
    num_rows, global_batch_size = len(loader.rows), loader.settings.global_batch_size
    if loader.dropped_rows:
        say(f"data.drop_last: {loader.dropped_rows} of {num_rows} rows are left out in each epoch")
    elif num_rows < global_batch_size:
        few = f"{num_rows} rows are fewer than the global batch of {global_batch_size}"
        say(f"data: {few}: each epoch is one step with all of them")
    if loader.settings.packing:
        packed, unpacked = loader.fill_rates()
        say(f"packing   {packed:.1%} of the tokens of a step are no padding; {unpacked:.1%} without packing")


def _capacity(run: RunConfig, plan: Plan) -> int:
    """The most tokens that packed rows may fill together, before any is read."""
    positions = plan.model.max_position_embeddings
    return min(run.data.max_length or positions, positions)


def _compiled_by_rule(
    run: RunConfig,
    plan: Plan,
    num_steps: int,
    compiler_available: bool,
    blueprint: Blueprint,
    say: Callable[[str], None],
) -> RunConfig:
    compiled, why = compile_rule(run, plan, num_steps, compiler_available)
    if compiled and has_dropout_layers(blueprint.model):
        compiled, why = False, "blocks run eagerly: the model has dropout layers, which do not compile"
    say(f"compile   {why}")
    return run.model_copy(update={"train": run.train.model_copy(update={"compile": compiled})})


def _start(parts: TrainerParts) -> tuple[TrainState, str | None]:
    """Where the run stands, and the checkpoint that it goes on from, relative to the output folder."""
    checkpoint, notes = intact_checkpoint(parts.run, parts.context.output_dir / CHECKPOINTS)
    terminal = parts.context.terminal
    for note in notes if terminal is not None else []:
        print(f"passed over {note}", file=terminal, flush=True)
    if checkpoint is None:
        return TrainState(), None
    state = restore(checkpoint, parts.identity, parts.loaded.model, parts.optimizer)
    if terminal is not None and is_unlisted(checkpoint):
        print(told_of_unlisted(checkpoint), file=terminal, flush=True)
    if terminal is not None:
        print(f"resuming from {Path(checkpoint)} after step {state.step}", file=terminal, flush=True)
        for line in changes(saved_state(checkpoint)["run"], parts.run):
            print(f"  changed {line}", file=terminal, flush=True)
    output_dir, path = parts.context.output_dir.resolve(), checkpoint.resolve()
    return state, str(path.relative_to(output_dir) if path.is_relative_to(output_dir) else path)
