"""The checkpoints that a run makes: the room for them, writing one at a time, and what becomes of the older ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.checkpoint.adapter import ADAPTER_FOLDER
from shardwise.checkpoint.listing import complete_checkpoints, step_of
from shardwise.checkpoint.save_job import Content, SaveJob
from shardwise.checkpoint.shelf import free_bytes, link, rotate, sweep
from shardwise.checkpoint.store import owned_bytes
from shardwise.errors import CheckpointError, SaveError
from shardwise.spec.run import RunConfig
from shardwise.train.optim import Optimizer
from shardwise.train.saving import TrainState, all_tensors
from shardwise.train.setup import LoadedModel, companions
from shardwise.train.step import sum_over_ranks
from shardwise.units import format_bytes

_HEAD_BYTES = 2**10  # around each tensor in a checkpoint, and about what the small files take


class CheckpointKeeper:
    """Makes the checkpoints of a run in ``folder``. Every method is to be called by all ranks.

    Args:
        write_adapter: writes the adapter into a folder; looked at where there is one.
    """

    def __init__(
        self,
        run: RunConfig,
        folder: Path,
        rank: int,
        loaded: LoadedModel,
        optimizer: Optimizer,
        write_adapter: Callable[[Path], None],
    ) -> None:
        self._run, self._folder, self._rank = run, folder, rank
        self._loaded, self._optimizer, self._write_adapter = loaded, optimizer, write_adapter
        self._job: SaveJob | None = None
        self._begun_at = time.monotonic()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still at work on it."""
        return self._job is not None and not self._job.is_written

    @cached_property
    def num_bytes(self) -> int:
        """Of one checkpoint, about: an adapter in PEFT's format is a third of what AdamW keeps of it."""
        tensors = all_tensors(self._loaded.model, self._optimizer)
        own = owned_bytes(tensors) + _HEAD_BYTES * len(tensors)
        if self._loaded.adapters is not None:
            own += owned_bytes({name: value for name, value in tensors.items() if name.startswith("model.")})
        return int(self._sum([float(own)])[0])

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write its part."""
        return self._job is not None and self._job.has_failed

    def check_room(self, state: TrainState, total_steps: int) -> None:
        """Refuse a run that cannot write what it is to write, before its first step.

        Raises:
            CheckpointError: with the bytes that are needed and those that are free.
        """
        if self._rank == 0:
            sweep(self._folder)  # what a kill has left counts as free
        saves = _number_of_saves(self._run, state, total_steps)
        export = self._export_bytes()
        if not saves and not export:
            return
        keep = self._run.save.keep + (self._run.save.best != "no")  # the best one stays beside the newest
        there = _number_there(self._folder, state.step) if self._rank == 0 else 0
        # A new checkpoint is complete before an old one goes; the export comes when the last rotation is over.
        while_saving = min(saves, max(1, keep + 1 - there)) * self.num_bytes
        at_end = min(saves, max(0, keep - there)) * self.num_bytes + export
        needed, free = self._sum(self._on_main(max(while_saving, at_end), free_bytes(self._folder)))
        if needed > free:
            many = f"up to {min(saves, keep + 1)} checkpoints of {format_bytes(self.num_bytes)}" if saves else ""
            parts = " and ".join(filter(None, [many, f"an export of {format_bytes(export)}" if export else ""]))
            rule = f"the run needs {format_bytes(needed)} for {parts}, and {format_bytes(free)} are free there"
            remedy = "Make room, use a smaller save.keep, or name another folder"
            raise CheckpointError(f"output_dir = {str(self._folder.parent)!r}", rule, remedy)

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, or begin to, with ``save.async``; the one before has been finished.

        Raises:
            SaveError: too little room, two copies of a tied weight that have drifted apart; nothing is written.
        """
        assert self._job is None, "one checkpoint at a time"
        drifted, free = self._sum([float(not self._loaded.model.tied_copies_agree()), *self._on_main(self._free())])
        if drifted:
            raise SaveError(f"step {step}", "the copies of the tied embedding differ", "Please report this")
        if free < self.num_bytes:
            rule = f"needs {format_bytes(self.num_bytes)}, and {format_bytes(free)} are free in {self._folder}"
            raise SaveError(f"the checkpoint of step {step}", rule, "What was there is untouched")
        content = Content(
            step=step,
            tensors=all_tensors(self._loaded.model, self._optimizer),
            state=state,
            source=companions(self._run),
            write_more=self._write_more if self._loaded.adapters is not None else None,
            num_bytes=self.num_bytes,
        )
        # The next one may be due as soon as this one was after the one before: half of that leaves room for a change.
        since, self._begun_at = time.monotonic() - self._begun_at, time.monotonic()
        # Steps on a device of its own are not slowed by what the host writes: no rest there.
        within = since / 2 if self._loaded.model.mesh.device.type == "cpu" else 0.0
        self._job = SaveJob(self._folder, content, background=self._run.save.async_, within=within)

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is on its way, if one is; then remove the ones that are too many.

        Returns:
            Where it is.

        Raises:
            SaveError: it could not be written.
        """
        if self._job is None:
            return None
        job, self._job = self._job, None
        path = job.finish()
        if self._rank == 0:
            link(self._folder)
            rotate(self._folder, self._run.save.keep)
        return path

    def _write_more(self, draft: Path) -> None:
        self._write_adapter(draft / ADAPTER_FOLDER)

    def _free(self) -> int:
        return free_bytes(self._folder) if self._rank == 0 else 0

    def _on_main(self, *values: float) -> list[float]:
        """The values on rank 0, zeros elsewhere: their sum over the ranks is what rank 0 knows."""
        return [float(value) if self._rank == 0 else 0.0 for value in values]

    def _sum(self, values: list[float]) -> list[float]:
        return sum_over_ranks(values, self._loaded.model.mesh.device)

    def _export_bytes(self) -> int:
        if not self._run.save.export or self._loaded.adapters is not None:
            return 0
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self._loaded.naming.tensors.values())


def _number_there(folder: Path, step: int) -> int:
    """The checkpoints that a run from ``step`` on counts as its own: those beyond it are set aside, and not rotated."""
    return sum((step_of(path) or 0) <= step for path in complete_checkpoints(folder))


def _number_of_saves(run: RunConfig, state: TrainState, total_steps: int) -> int:
    """How many checkpoints are to come, at least."""
    if run.save.strategy == "steps" and run.save.steps is not None:
        return total_steps // run.save.steps - state.step // run.save.steps
    if run.save.strategy == "epoch" and state.step < total_steps:
        return 1 if run.train.epochs is None else max(1, run.train.epochs - state.loader.epoch)
    return 0
