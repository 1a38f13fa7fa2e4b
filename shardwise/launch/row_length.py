"""How long the rows of a run are, before anything is tokenised: the longest of the first ones counts. Loads no torch.

Texts are counted in bytes. A token of a usual vocabulary is some four bytes of English and three of Chinese, so three
bytes are a length that few rows exceed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.readers import read_records
from shardwise.errors import ConfigError
from shardwise.spec.compiling import DEFAULT_ROW_TOKENS
from shardwise.spec.run import RunConfig, data_sources

_LOOKED_AT = 200  # rows of each source
_TOKEN_BYTES = 3
_LEAST_TOKENS = 16


def row_tokens(run: RunConfig, max_positions: int) -> int:
    """Tokens of the longest rows that the run is to expect, at most what ``data.max_length`` and the model allow.

    Packed rows fill what is allowed. Rows that cannot be read here (a script's, a broken file's) count as 512 tokens.
    """
    most = min(run.data.max_length or max_positions, max_positions)
    if run.data.packing:
        return most
    seen = [_longest(Path(source.path)) for source in data_sources(run.data.train)]
    return min(most, max(_LEAST_TOKENS, max(seen, default=DEFAULT_ROW_TOKENS)))


def _longest(path: Path) -> int:
    try:
        values = [record.value for record in read_records(path, _LOOKED_AT) if record.value is not None]
    except (ConfigError, OSError):
        values = []
    return max((_tokens(value) for value in values), default=DEFAULT_ROW_TOKENS)


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
