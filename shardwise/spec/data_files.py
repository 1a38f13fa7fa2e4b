"""Which files hold rows, and where prepared ones are kept: what is asked before a start, so it loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.cache import cache_folder

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def data_folder(environ: Mapping[str, str]) -> Path | None:
    """``shardwise/data`` in the user's cache; None for a user without a home."""
    return cache_folder(environ, "data")
