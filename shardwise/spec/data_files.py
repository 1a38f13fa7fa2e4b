"""Which files hold rows, and where prepared ones are kept: what is asked before a start, so it loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.spec.described import description_folder

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


def data_folder(environ: Mapping[str, str]) -> Path | None:
    """``shardwise/data`` in the user's cache; None for a user without a home."""
    models = description_folder(environ)
    return None if models is None else models.with_name("data")
