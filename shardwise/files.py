"""Small files that others read while we write them, or after we were killed. Imports no torch."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_DRAFT = ".draft"


def replace_text(path: Path, text: str) -> None:
    """Write a file in one move: it holds ``text`` (UTF-8), or what it held before, and never a part of either.

    What is no file of its own (``/dev/stdout``, a pipe) is written straight. The system is not told to keep the
    content (no fsync): this serves readers and survives kills, not a power cut.

    Raises:
        OSError: it cannot be written; ``path`` is as it was, and no draft stays.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    draft = path.with_name(f".{uuid.uuid4().hex}{_DRAFT}")  # several processes may write the same file
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def is_draft(name: str) -> bool:
    """Whether a file of this name may be what a process left that was killed in :func:`replace_text`."""
    return name.startswith(".") and name.endswith(_DRAFT)


def remove_drafts(folder: Path) -> None:
    """Remove what killed processes left in a folder in which nobody else writes now."""
    for path in folder.glob(f".*{_DRAFT}"):
        path.unlink(missing_ok=True)
