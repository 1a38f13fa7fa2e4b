"""How long the rows of a run are, before anything is tokenised: the longest of the first ones counts. Loads no torch.

Plans for devices that are not here and runs that are planned ask the same function.

Texts are counted in bytes. A token of a usual vocabulary is some four bytes of English and three of Chinese, so three
bytes are a length that few rows exceed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.data.readers import read_records
from shardwise.errors import ConfigError
from shardwise.spec.compiling import DEFAULT_ROW_TOKENS
from shardwise.spec.run import RunConfig, data_sources

_LOOKED_AT = 200  # rows of each source
_TOKEN_BYTES = 3
_LEAST_TOKENS = 16
_MOST_TOKENS = 4096  # of a row, where no data are named


@dataclass(frozen=True)
class RowLength:
    """Tokens of a row to plan for, and where the number is from."""

    tokens: int
    source: str


def row_length(run: RunConfig, max_positions: int) -> RowLength:
    """The longest rows that a run is to expect, at most what ``data.max_length`` and the model allow.

    Packed rows fill ``data.max_length``; without it they are packed up to the longest one. Of a source that cannot be
    read here (a script's, a broken file's) rows count as 512 tokens. Where no data are named, they have as many as
    ``data.max_length`` allows, else at most 4,096.
    """
    given = run.data.max_length
    most = min(given or max_positions, max_positions)
    limit = "the positions of the model" + (", fewer than data.max_length" if given is not None else "")
    if given is not None and given <= max_positions:
        limit = "data.max_length"
    if run.data.packing and given is not None:
        return RowLength(most, f"packed rows fill {limit}")
    sources = data_sources(run.data.train) if run.data.train else []
    if not sources:
        if given is None and most > _MOST_TOKENS:
            return RowLength(_MOST_TOKENS, "usual, since neither data nor data.max_length are given")
        return RowLength(most, f"{limit}, since no data are given")
    seen = [_longest(Path(source.path)) for source in sources]
    longest = max(_LEAST_TOKENS, *(DEFAULT_ROW_TOKENS if found is None else found for found in seen))
    if longest > most:
        return RowLength(most, limit)
    if all(found is None for found in seen):
        return RowLength(longest, "usual, since the rows cannot be read here")
    unread = f", {DEFAULT_ROW_TOKENS} for a source that cannot be read here" if None in seen else ""
    return RowLength(longest, f"the longest of the first {_LOOKED_AT} rows{unread}")


def _longest(path: Path) -> int | None:
    """Of the first rows; None where none can be read."""
    try:
        values = [record.value for record in read_records(path, _LOOKED_AT) if record.value is not None]
    except (ConfigError, OSError):
        values = []
    return max((_tokens(value) for value in values), default=None)


def _tokens(value: Any) -> int:
    if isinstance(value, dict) and isinstance(value.get("input_ids"), list):
        return len(value["input_ids"])
    return -(-_text_bytes(value) // _TOKEN_BYTES)


def _text_bytes(value: Any) -> int:
    """Bytes of all texts in a row, names of roles included, which stand for what a template adds."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list | tuple) else 0
