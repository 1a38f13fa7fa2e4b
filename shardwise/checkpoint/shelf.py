"""What becomes of the checkpoints of a run: links to the newest and the best, rotation, room. Imports no torch.

Each function is called by one rank, after a checkpoint is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

from shardwise.checkpoint.listing import (
    BEST,
    LATEST,
    PIN_FILE,
    STATE_FILE,
    SUPERSEDED,
    complete_checkpoints,
    step_of,
)

_GONE = ".gone"  # end of the name of a checkpoint that is being removed


def sweep(folder: Path) -> None:
    """Remove what interrupted saves and removals have left."""
    for path in (*folder.glob(".step-*.draft"), *folder.glob(f".step-*{_GONE}")):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Move a folder of ``checkpoints/`` into ``superseded/``; its path there."""
    number, target = 1, checkpoint.parent / SUPERSEDED / checkpoint.name
    while target.exists():
        number += 1
        target = target.with_name(f"{checkpoint.name}.{number}")
    target.parent.mkdir(exist_ok=True)
    return checkpoint.rename(target)


def supersede(folder: Path, step: int) -> list[Path]:
    """Set the checkpoints beyond ``step`` aside: a run that goes on from an older one makes these steps anew, and
    neither rotation nor ``resume: auto`` may take the abandoned ones for its own.

    Returns:
        Where they are now.
    """
    return [set_aside(path) for path in complete_checkpoints(folder) if (step_of(path) or 0) > step]


def best_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the lowest value of ``save.best``, the oldest of equal ones; None if none has one.

    A value that is no finite number counts as none.
    """
    valued = [(value, path) for path in complete_checkpoints(folder) if (value := _value(path)) is not None]
    return min(valued, key=lambda pair: pair[0])[1] if valued else None


def _value(checkpoint: Path) -> float | None:
    try:
        value = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")).get("best")
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def link(folder: Path) -> None:
    """Let ``LATEST`` and ``BEST`` point to the checkpoints that they name, each in one move.

    A file system without links has none: they are for people and scripts, ``resume: auto`` looks at the checkpoints.
    """
    newest = next(iter(reversed(complete_checkpoints(folder))), None)
    for name, target in ((LATEST, newest), (BEST, best_checkpoint(folder))):
        place, draft = folder / name, folder / f".{name}.draft"
        draft.unlink(missing_ok=True)
        if target is None:
            place.unlink(missing_ok=True)
            continue
        try:
            draft.symlink_to(target.name, target_is_directory=True)
        except (OSError, NotImplementedError):
            return
        os.replace(draft, place)


def rotate(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints, the best and those that are pinned; what was removed.

    A checkpoint loses its name before its files, so that none is ever half removed under it.
    """
    complete = complete_checkpoints(folder)
    kept = {*complete[-keep:], best_checkpoint(folder)}
    removed = [path for path in complete if path not in kept and not (path / PIN_FILE).exists()]
    for path in removed:
        gone = path.with_name(f".{path.name}{_GONE}")
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(path.rename(gone))
    return removed


def free_bytes(folder: Path) -> int:
    """Bytes that are free where ``folder`` is, or would be made."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return shutil.disk_usage(existing).free
