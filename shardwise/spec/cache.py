"""What is kept in the user's cache: where it lies, how a file of it is named, and how it is written. Imports no torch.

A file is named by everything that its content depends on, so none is ever out of date.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from shardwise.files import replace_text


def cache_folder(environ: Mapping[str, str], kind: str) -> Path | None:
    """``shardwise/KIND`` in the user's cache, which need not be there yet; None for a user without a home."""
    base = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else None)
    return None if base is None else Path(base) / "shardwise" / kind


def hash_of_all(parts: Iterable[object]) -> str:
    """A name, in hexadecimal digits, for what depends on ``parts`` in this order."""
    return hashlib.sha256(chr(0).join(map(str, parts)).encode()).hexdigest()


@cache
def code_hash(rooms: tuple[str, ...]) -> str:
    """A hash of the code in some rooms of this package; it stands for its version, and changes between two of them."""
    root = Path(__file__).resolve().parents[1]
    files = [path for room in rooms for path in sorted((root / room).glob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a file of a cache, whole or not at all; where it cannot be written nothing is."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
