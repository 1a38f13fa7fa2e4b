"""Rows whose columns have names of their own, under the names that formats know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.data.detect import CONVERSATIONS
from shardwise.data.format import BadRow

# Columns whose cells hold JSON where a table can hold text alone.
_EXTRAS = ("tools", "functions", "chat_template_kwargs", "completion_mask", "assistant_masks", "loss_mask")
JSON_COLUMNS = {*CONVERSATIONS, "segments", "history", "input_ids", "labels", "position_ids", "attention_mask"}
JSON_COLUMNS |= {*_EXTRAS}
# What a row may lack: the column is then left out, as where no names are given.
_OPTIONAL = ("system", "history", "query", "input", "context", "labels", "position_ids", *_EXTRAS)


def renamed(value: Any, columns: Mapping[str, str] | None) -> Any:
    """A row with the columns that ``columns`` names, ``{name that is known: name in the file}``, and no others.

    Without names it has its own. In both, a column that would hold turns, ids or tools may hold them as JSON text.

    Raises:
        BadRow: a column that the row lacks.
    """
    if not isinstance(value, dict):
        return value
    if not columns:  # turns may stand as JSON text where the writer of a table knew no lists
        texts = [key for key in CONVERSATIONS if isinstance(value.get(key), str)]
        return value | {key: _parsed(key, value[key]) for key in texts} if texts else value
    missing = [(known, own) for known, own in columns.items() if own not in value and known not in _OPTIONAL]
    if missing:
        known, own = missing[0]
        has = ", ".join(map(repr, list(value)[:10])) or "none"
        raise BadRow(f"has no column {own!r}, which data.columns names as {known} (columns: {has})")
    found = {known: value[own] for known, own in columns.items() if own in value}
    # A reader of tables does not know these columns by their own names.
    blank = [key for key, cell in found.items() if key in JSON_COLUMNS and isinstance(cell, str) and not cell.strip()]
    return {key: _parsed(key, cell) for key, cell in found.items() if key not in blank}


def _parsed(key: str, cell: Any) -> Any:
    """What a cell with the text of JSON holds, in a column that would hold it; every other cell as it is."""
    if key in JSON_COLUMNS and isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            pass  # the format's own check says what was expected
    return cell
