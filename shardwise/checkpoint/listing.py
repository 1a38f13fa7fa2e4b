"""The checkpoints in a folder, and what can be known of one without torch: its step, whether it is whole, its state."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

CHECKPOINTS = "checkpoints"
STATE_FILE, INDEX_FILE = "state.json", ".metadata"
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """``step-00000010``: eight digits, so that names sort as steps do."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name tells, None for a folder of another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest step first (by number, not by name or time)."""
    found = [(step, path) for path in folder.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found) if not missing_in(path)]


def missing_in(checkpoint: Path) -> str:
    """What a checkpoint lacks to be complete; empty if nothing. It got its name last, so little can be amiss."""
    needed = (STATE_FILE, INDEX_FILE)
    lacking = [name for name in needed if not (checkpoint / name).is_file()]
    if not any(checkpoint.glob("*.distcp")):
        lacking.append("*.distcp")
    return ", ".join(lacking)


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint.

    Raises:
        CheckpointError: it is not complete, or its state cannot be read.
    """
    near = complete_checkpoints(checkpoint) or complete_checkpoints(checkpoint / CHECKPOINTS)
    near = near or complete_checkpoints(checkpoint.parent)
    remedy = f"Use resume={near[-1]}" if near else "Give a folder checkpoints/step-*, or resume=auto"
    lacking = missing_in(checkpoint)
    if lacking:
        raise CheckpointError(f"resume = {str(checkpoint)!r}", f"not a complete checkpoint: no {lacking}", remedy)
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state["train"], dict) or not isinstance(state["identity"], dict):
            raise TypeError("not a run's state")
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"its {STATE_FILE} is damaged ({type(error).__name__}: {error})"
        raise CheckpointError(f"resume = {str(checkpoint)!r}", rule, remedy) from None
    return state
