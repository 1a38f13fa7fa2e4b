"""What a checkpoint of a run holds, and how a run goes on from one."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import passed_over, saved_state
from shardwise.checkpoint.save_job import damage_in
from shardwise.checkpoint.store import (
    SlicedTensor,
    load_checkpoint,
    tensor_state,
)
from shardwise.config import flatten
from shardwise.data.batch import LoaderState
from shardwise.errors import CheckpointError
from shardwise.models.lora import Adapters
from shardwise.parallel.agreement import from_rank_0
from shardwise.parallel.model import ParallelModel
from shardwise.spec.run import RunConfig
from shardwise.train.identity import RunIdentity, refuse_damaged, resumable
from shardwise.train.optim import Optimizer
from shardwise.units import format_exact


@dataclass(frozen=True)
class TrainState:
    """How far a run is.

    ``num_updates`` leaves out the steps that changed nothing; ``callbacks`` is what callbacks want to be kept.
    ``owed_evaluation`` is the epoch of an evaluation that was due after this step and that a stop left out.
    """

    step: int = 0
    num_updates: int = 0
    loader: LoaderState = field(default_factory=LoaderState)
    callbacks: dict[str, Any] = field(default_factory=dict)
    owed_evaluation: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        loader = LoaderState.from_json(data["loader"])
        owed = data.get("owed_evaluation")
        return cls(data["step"], data["num_updates"], loader, data.get("callbacks", {}), owed)


def lora_fingerprint(run: RunConfig, adapters: Adapters | None) -> str:
    """What of a run's adapters must stay the same: sizes, scale and places, and for a random base its seed."""
    if adapters is None:
        return "none"
    config, places = adapters.config, "\n".join((*adapters.targets, *adapters.saved))
    modules = f"{len(adapters.targets)} modules and {len(adapters.saved)} whole"
    base = f", random base of seed {run.train.seed}" if run.model_init == "random" else ""
    digest = hashlib.sha256(places.encode()).hexdigest()[:8]
    return f"r {config.r}, alpha {format_exact(config.lora_alpha)} on {modules} ({digest}){base}"


def all_tensors(model: ParallelModel, optimizer: Optimizer) -> dict[str, SlicedTensor]:
    """Trained weights and optimizer state by parameter name, as slices that share the live storage.

    What is frozen is not saved: it is read again from the model folder.
    """
    trained = [(shard.layout, shard.data) for shard in model.shards if shard.parameter.requires_grad]
    tensors = tensor_state(trained, "model")
    for slot in optimizer.slots:
        tensors |= tensor_state([(s.layout, value) for s, value in optimizer.state(slot)], f"optimizer.{slot}")
    return tensors


def intact_checkpoint(run: RunConfig, folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that ``resume`` means, with all its content as it was written, and what was passed over for it.

    To be called by all ranks: each reads a share of the files.

    Returns:
        Its folder, None to start; and a line for each newer folder that was not taken, with the reason.

    Raises:
        CheckpointError: the checkpoint that was named is damaged, or every one there is: a start from step 0 would
            cut the metrics, unasked.
    """
    candidates: list[Path] = from_rank_0(lambda: resumable(run, folder))
    notes = []
    for checkpoint in candidates:
        damage = damage_in(checkpoint)
        if not damage:
            break
        if run.resume != "auto":
            raise CheckpointError(f"resume = {run.resume!r}", f"a damaged checkpoint: {damage}", "Use another one")
        notes.append(f"{checkpoint.name}: {damage}")
    else:
        checkpoint = None
    if run.resume == "auto":
        notes = sorted([*notes, *from_rank_0(lambda: passed_over(folder, checkpoint))], reverse=True)
        if checkpoint is None:
            refuse_damaged(run, notes)
    return checkpoint, notes


def restore(checkpoint: Path, identity: RunIdentity, model: ParallelModel, optimizer: Optimizer) -> TrainState:
    """Load weights and optimizer state in place and return where the run stands.

    Raises:
        CheckpointError: a checkpoint of another model, optimizer or data set, or an incomplete one.
    """
    saved = saved_state(checkpoint)
    identity.check(saved["identity"], checkpoint)
    load_checkpoint(checkpoint, all_tensors(model, optimizer))
    state = TrainState.from_json(saved["train"])
    optimizer.set_num_updates(state.num_updates)
    return state


def changes(saved: dict[str, Any], run: RunConfig) -> list[str]:
    """``train.learning_rate: 5e-05 -> 1e-05`` for every key that differs from the run that saved."""
    before, now = flatten(saved), flatten(run.model_dump(mode="json"))
    ignored = ("resume", "overwrite", "output_dir", "filled")
    return [
        f"{key}: {before.get(key)} -> {value}"
        for key, value in now.items()
        if key not in ignored and before.get(key) != value
    ]
