"""The checkpoints in a folder, and what can be known of one without torch: its step, whether it is whole, its state."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

CHECKPOINTS = "checkpoints"
STATE_FILE, INDEX_FILE, MANIFEST_FILE = "state.json", ".metadata", "files.json"
PIN_FILE = "pinned"  # put into a checkpoint by its user: rotation leaves it
LATEST, BEST = "LATEST", "BEST"  # links to the newest checkpoint and to the best
SUPERSEDED = "superseded"
UNFINISHED = "its save came to no end"
_NAME = re.compile(r"step-(\d{8,})")
_BLOCK_BYTES = 2**20
_DRAFT = re.compile(r"\.(step-\d{8,})\.draft")


def checkpoint_name(step: int) -> str:
    """``step-00000010``: eight digits, so that names sort as steps do."""
    return f"step-{step:08d}"


def draft_of(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return checkpoint.with_name(f".{checkpoint.name}.draft")


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name tells, None for a folder of another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it was written: its size in bytes, and the CRC-32 of its content."""

    bytes: int
    crc32: int


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file as it is now."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return FileRecord(size, checksum)


def manifest_text(step: int, files: dict[str, FileRecord]) -> str:
    """The list of a checkpoint's files, which is written last of all."""
    entries = {name: [record.bytes, record.crc32] for name, record in sorted(files.items())}
    return json.dumps({"schema": 1, "step": step, "files": entries}, indent=1) + "\n"


def read_manifest(checkpoint: Path) -> tuple[int, dict[str, FileRecord]]:
    """The step and the files that a checkpoint's list names.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not there or damaged.
    """
    data = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
    files = {str(name): FileRecord(int(size), int(crc)) for name, (size, crc) in data["files"].items()}
    return int(data["step"]), files


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest step first (by number, not by name or time)."""
    return [path for _, path in _named(folder) if not fault_in(path)]


def fault_in(checkpoint: Path) -> str:
    """Why a folder is no complete checkpoint; empty if it is one.

    Every file that its list names is looked for, with its size. The content of the small ones, by which a checkpoint is
    chosen, is compared too; that of the others when it is loaded.
    """
    needed = (STATE_FILE, INDEX_FILE, MANIFEST_FILE)
    lacking = [name for name in needed if not (checkpoint / name).is_file()]
    if lacking:
        return f"it has no {', '.join(lacking)}"
    try:
        step, files = read_manifest(checkpoint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST_FILE} is damaged ({type(error).__name__})"
    if step_of(checkpoint.resolve()) not in (None, step):
        return f"it is a copy of {checkpoint_name(step)} under another name"
    for name, record in files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError:
            return f"it has no {name}"
        if size != record.bytes:
            return f"its {name} has {size} bytes of {record.bytes}"
    changed = next((name for name in (STATE_FILE, INDEX_FILE) if record_of(checkpoint / name) != files.get(name)), None)
    return "" if changed is None else f"the content of its {changed} is not what was written"


def is_unlisted(checkpoint: Path) -> bool:
    """Whether the list of its files is all that a folder lacks of a checkpoint: an older version has written it, or it
    was copied by hand. It is taken where it is named, and never chosen."""
    there = (STATE_FILE, INDEX_FILE)
    return not (checkpoint / MANIFEST_FILE).exists() and all((checkpoint / name).is_file() for name in there)


def told_of_unlisted(checkpoint: Path) -> str:
    """What a user is to know of a checkpoint without a list of its files that is about to be read."""
    told = f"{checkpoint.name} has no {MANIFEST_FILE}: its files are as long as its index says"
    return f"{told}; what they hold cannot be compared with what was written"


def passed_over(folder: Path, chosen: Path | None) -> list[str]:
    """What in ``folder`` looks like a checkpoint newer than ``chosen`` and is none, each with the reason."""
    limit = -1 if chosen is None else (step_of(chosen.resolve()) or 0)
    notes = [(step, f"{path.name}: {fault}") for step, path in _named(folder) if (fault := fault_in(path))]
    for path in folder.glob(".step-*.draft"):
        match = _DRAFT.fullmatch(path.name)
        if match:
            notes.append((int(match[1].removeprefix("step-")), f"{match[1]}: {UNFINISHED}"))
    return [note for step, note in sorted(notes, reverse=True) if step > limit]


def _named(folder: Path) -> Iterator[tuple[int, Path]]:
    """Everything with a checkpoint's name, by step."""
    found = ((step_of(path), path) for path in folder.glob("step-*"))
    return iter(sorted((step, path) for step, path in found if step is not None))


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint, of one without a list of its files as well.

    Raises:
        CheckpointError: it is not complete, or its state cannot be read.
    """
    near = complete_checkpoints(checkpoint) or complete_checkpoints(checkpoint / CHECKPOINTS)
    near = near or complete_checkpoints(checkpoint.parent)
    remedy = f"Use resume={near[-1]}" if near else "Give a folder checkpoints/step-*, or resume=auto"
    fault = fault_in(checkpoint)
    if fault and not is_unlisted(checkpoint):
        raise CheckpointError(f"resume = {str(checkpoint)!r}", f"not a complete checkpoint: {fault}", remedy)
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state["train"], dict) or not isinstance(state["identity"], dict):
            raise TypeError("not a run's state")
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"its {STATE_FILE} is damaged ({type(error).__name__}: {error})"
        raise CheckpointError(f"resume = {str(checkpoint)!r}", rule, remedy) from None
    return state
