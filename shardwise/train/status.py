"""``status.json``: how a run stands, or how it ended.

There is one writer at a time: the launcher before the workers start and after the last is gone, rank 0 between.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

FILE_NAME = "status.json"


@dataclass(frozen=True)
class Status:
    """The object in ``status.json``.

    Attributes:
        exit_code: exit status of the job, None while it runs.
        step: last optimizer step that was completed.
        rank: the rank that failed, None if none did.
        error: its first error, in one message.
        checkpoint: newest complete checkpoint, relative to the output folder.
    """

    state: Literal["running", "done", "refused", "failed", "stopped"] = "running"
    exit_code: int | None = None
    step: int | None = None
    rank: int | None = None
    error: str | None = None
    checkpoint: str | None = None


def write_status(output_dir: Path, status: Status) -> None:
    """Replace ``status.json`` in one move, so that a reader never meets half a file."""
    path = output_dir / FILE_NAME
    draft = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(status), ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


def read_status(output_dir: Path) -> Status | None:
    """The status of a run, or None where none was ever started."""
    path = output_dir / FILE_NAME
    return Status(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def update_status(output_dir: Path, **changes: Any) -> Status:
    """Change some fields (the names of :class:`Status`) and keep the others."""
    status = replace(read_status(output_dir) or Status(), **changes)
    write_status(output_dir, status)
    return status
