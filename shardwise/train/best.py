"""``save.export: best``: at the end the model becomes that of the best checkpoint."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.listing import saved_state, step_of
from shardwise.checkpoint.save_job import damage_in
from shardwise.checkpoint.shelf import best_checkpoint
from shardwise.checkpoint.store import load_checkpoint, tensor_state
from shardwise.errors import CheckpointError
from shardwise.parallel.agreement import from_rank_0
from shardwise.parallel.model import ParallelModel
from shardwise.train.saving import TrainState


def take_best(folder: Path, model: ParallelModel, state: TrainState) -> tuple[TrainState, str]:
    """Load the weights of the best checkpoint in ``folder`` into ``model``, which is that of ``state``.

    To be called by all ranks. Frozen weights are not in it, and are as they were.

    Returns:
        The state of the run when it had these weights, and a line for the terminal.

    Raises:
        CheckpointError: that checkpoint is damaged; those on disk stay as they are.
    """
    best: Path | None = from_rank_0(lambda: best_checkpoint(folder))
    if best is None:
        return state, f"no checkpoint has an eval_loss: what is exported is the model of step {state.step}"
    if step_of(best) != state.step:
        damage = damage_in(best)
        if damage:
            raise CheckpointError(str(best), f"is damaged: {damage}", "Export another one with shardwise export")
        trained = [(shard.layout, shard.data) for shard in model.shards if shard.parameter.requires_grad]
        load_checkpoint(best, tensor_state(trained, "model"))
        state = TrainState.from_json(from_rank_0(lambda: saved_state(best)["train"]))
    note = f"what is exported is the model of step {state.step}, whose eval_loss is the lowest of all checkpoints"
    return state, note
