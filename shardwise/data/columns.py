"""Rows whose columns have names of their own, under the names that formats know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.data.format import BadRow

# What a row may lack: the column is then left out, as where no names are given.
_OPTIONAL = ("system", "history", "tools", "query", "input", "context", "labels", "position_ids")


def renamed(value: Any, columns: Mapping[str, str] | None) -> Any:
    """A row with the columns that ``columns`` names, ``{name that is known: name in the file}``, and no others.

    Without names, and where the row is no object, it is what it was.

    Raises:
        BadRow: a column that the row lacks.
    """
    if not columns or not isinstance(value, dict):
        return value
    missing = [(known, own) for known, own in columns.items() if own not in value and known not in _OPTIONAL]
    if missing:
        known, own = missing[0]
        has = ", ".join(map(repr, list(value)[:10])) or "none"
        raise BadRow(f"has no column {own!r}, which data.columns names as {known} (columns: {has})")
    return {known: value[own] for known, own in columns.items() if own in value}
