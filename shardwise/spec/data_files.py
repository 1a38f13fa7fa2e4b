"""Which files hold rows, and where prepared ones are kept: what is asked before a start, so it loads nothing heavy."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.cache import cache_folder

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4")  # may follow one of these


def data_suffix(name: str) -> str:
    """The suffix that says what a file holds, in small letters; empty where it is none of a data file."""
    plain = name.lower()
    packing = next((end for end in PACKED if plain.endswith(end)), "")
    return next((end for end in SUFFIXES if plain.removesuffix(packing).endswith(end)), "")


def named_files(pattern: Path) -> list[Path]:
    """The files that a pattern such as ``rows/*.jsonl`` or ``rows/**/*.parquet`` stands for, in order of their names.

    None for what is no pattern. ``pattern`` is a path as the file system takes it.
    """
    return [path for path in named_paths(pattern) if path.is_file()]


def named_paths(pattern: Path) -> list[Path]:
    """:func:`named_files`, and the folders that a pattern such as ``rows/part-*`` names, which hold such files.

    Those between the files of ``**`` are none of them: what lies below is named, too.
    """
    if not glob.has_magic(str(pattern)):
        return []
    found = (Path(name) for name in sorted(glob.glob(str(pattern), recursive=True)))
    return [path for path in found if "**" not in pattern.parts or path.is_file()]


def data_folder(environ: Mapping[str, str]) -> Path | None:
    """``shardwise/data`` in the user's cache; None for a user without a home."""
    return cache_folder(environ, "data")
