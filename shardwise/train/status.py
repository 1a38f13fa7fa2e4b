"""``status.json``: how a run stands, or how it ended. Imports no torch.

There is one writer at a time: the launcher before the workers start and after the last is gone, rank 0 between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.files import replace_text
from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.metrics import last_step

FILE_NAME = "status.json"
STEP_SECONDS = 1.0  # a step alone is no reason to write the file more often


@dataclass(frozen=True)
class Status:
    """The object in ``status.json``.

    Attributes:
        exit_code: exit status of the job, None while it runs.
        step: last optimizer step that was completed; up to a second old while the run goes on.
        rank: the rank that failed, None if none did.
        error: its first error, in one message.
        checkpoint: newest complete checkpoint, relative to the output folder.
        reason: why a run ended before its last step though nothing failed, None else.
        ended_at: the step after which it ended for that reason; kept while a script that was started again gets there.
        first_step: steps that were done before this start, None until it has begun.
        restarts: how often the launcher has started the workers again after a failure.
        restart_seconds: from the last failure to the end of the first step after it; None without one.
        prediction: of a run that was planned, what was predicted and what was measured (:mod:`.predicted`).
    """

    state: Literal["running", "done", "refused", "failed", "stopped"] = "running"
    exit_code: int | None = None
    step: int | None = None
    rank: int | None = None
    error: str | None = None
    checkpoint: str | None = None
    reason: str | None = None
    ended_at: int | None = None
    first_step: int | None = None
    restarts: int = 0
    restart_seconds: float | None = None
    prediction: dict[str, Any] | None = None


def write_status(output_dir: Path, status: Status) -> None:
    """Replace ``status.json`` in one move, so that a reader never meets half a file."""
    replace_text(output_dir / FILE_NAME, json.dumps(asdict(status), ensure_ascii=False) + "\n")


def read_status(output_dir: Path) -> Status | None:
    """The status of a run, or None where none was ever started."""
    path = output_dir / FILE_NAME
    return Status(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def update_status(output_dir: Path, **changes: Any) -> Status:
    """Change some fields (the names of :class:`Status`) and keep the others."""
    status = replace(read_status(output_dir) or Status(), **changes)
    write_status(output_dir, status)
    return status


def finish_status(output_dir: Path, **changes: Any) -> Status:
    """:func:`update_status` for a run that is over.

    Rank 0 may have been killed with up to a second of steps in its memory alone; ``metrics.jsonl``, which
    is written at each step, tells which was the last.
    """
    status = read_status(output_dir) or Status()
    made = status.step is not None and status.first_step is not None and status.step > status.first_step
    if made and status.step is not None:  # before its first step the metrics are those of another start
        changes = {"step": max(status.step, last_step(output_dir))} | changes
    return update_status(output_dir, **changes)


class StatusFile(Callback):
    """Keeps the step in memory; writes it about once a second and with every checkpoint, and at the end.

    A write changes these fields alone: under a foreign launcher another rank may have told of its failure.
    """

    main_only = True
    may_stop = False

    def __init__(self, checkpoint: str | None = None) -> None:
        self._fields: dict[str, Any] = {} if checkpoint is None else {"checkpoint": checkpoint}

    def on_train_begin(self, info: RunInfo) -> None:
        self._folder = info.output_dir
        self._first_step = info.first_step
        self._write(step=info.first_step, first_step=info.first_step)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._fields["step"] = step
        if step == self._first_step + 1 or time.monotonic() - self._written >= STEP_SECONDS:
            self._write()

    def on_save(self, path: Path) -> None:
        self._write(checkpoint=str(path.relative_to(self._folder)))

    def on_train_end(self, reason: str | None) -> None:
        self._write(reason=reason, ended_at=None if reason is None else self._fields["step"])

    def _write(self, **changes: Any) -> None:
        self._fields |= changes
        self._written = time.monotonic()
        update_status(self._folder, **self._fields)
