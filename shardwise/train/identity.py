"""What must be the same for a checkpoint to be gone on from, and what can be known of a checkpoint without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig

CHECKPOINTS = "checkpoints"
STATE_FILE, INDEX_FILE = "state.json", ".metadata"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for a checkpoint to be gone on from."""

    model: str
    optimizer: str
    data: str
    lora: str = "none"

    def check(self, saved: dict[str, str], checkpoint: Path, names: Collection[str] = ()) -> None:
        """Refuse a checkpoint of another run, by the name of what differs; ``names``: look at these alone.

        Raises:
            CheckpointError: something differs.
        """
        for name, value in asdict(self).items():
            before = saved.get(name, "none" if name == "lora" else None)
            if before != value and (not names or name in names):
                raise CheckpointError(
                    f"resume from {checkpoint}",
                    f"its {name} is {before}, that of this run {value}",
                    f"Resume with the same {name}, or start anew with resume=no in another output_dir",
                )


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest step first (by number, not by name or time)."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if not missing_in(path)]


def missing_in(checkpoint: Path) -> str:
    """What a checkpoint lacks to be complete; empty if nothing. It got its name last, so little can be amiss."""
    needed = (STATE_FILE, INDEX_FILE)
    lacking = [name for name in needed if not (checkpoint / name).is_file()]
    if not any(checkpoint.glob("*.distcp")):
        lacking.append("*.distcp")
    return ", ".join(lacking)


def chosen_checkpoint(run: RunConfig, folder: Path) -> Path | None:
    """The checkpoint that ``resume`` means: the newest complete one in ``folder``, the one given, or None to start."""
    if run.resume == "no":
        return None
    if run.resume == "auto":
        return next(iter(reversed(complete_checkpoints(folder))), None)
    return Path(run.resume)


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


def check_resume(run: RunConfig, plan: Plan, folder: Path) -> None:
    """Refuse to go on from a checkpoint that is incomplete, or of another model, optimizer or kind of adapters.

    That the data are the same shows when they are read.

    Raises:
        CheckpointError: the reason.
    """
    checkpoint = chosen_checkpoint(run, folder)
    if checkpoint is None:
        return
    saved: dict[str, str] = saved_state(checkpoint)["identity"]
    lora = f"r {run.lora.r}, alpha {run.lora.alpha:g}" if run.lora is not None else "none"
    if run.lora is not None and saved.get("lora", "none").startswith(f"{lora} on "):
        lora = saved["lora"]  # on which modules is known when the model has been built
    identity = RunIdentity(plan.model.hash, run.train.optimizer, saved.get("data", ""), lora)
    identity.check(saved, checkpoint)
