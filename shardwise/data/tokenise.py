"""Items of a file to token rows, many at a time: what a process of its own can do, with no word to anyone else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.data.columns import renamed
from shardwise.data.convert import read_row, unused_columns
from shardwise.data.cut import shorten, split
from shardwise.data.detect import check_format, format_of, has_no_turns
from shardwise.data.encode import RowEncoder
from shardwise.data.format import IGNORED, BadRow, Conversation, Format, Sample, Tokens
from shardwise.data.source import Item, Record, parse


@dataclass(frozen=True)
class Limits:
    """What rows are held against.

    ``tokens`` is the longest row (None: any), ``on_long`` what becomes of a longer one; ids lie below ``vocab_size``,
    positions below ``max_positions``. ``columns`` are the names that rows are read under, as
    :func:`shardwise.data.columns.renamed` takes them.
    """

    vocab_size: int
    max_positions: int | None = None
    tokens: int | None = None
    on_long: str = "refuse"
    columns: Mapping[str, str] | None = None


@dataclass
class Chunk:
    """Rows of one file in use, and what became of others: ``(line, reason)`` and ``(line, length)``.

    ``hopeless`` is a reason after which the file cannot be read on; ``notes`` say how the rows were read;
    ``unused`` are columns with text that were not looked at. ``columns`` may stand in for ``rows``, as
    :func:`shardwise.data.store.columns_of` makes them.
    """

    rows: list[Tokens] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    fingerprints: list[bytes] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    hopeless: tuple[int, str] | None = None
    refused: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    truncated: list[tuple[int, int]] = field(default_factory=list)
    split: list[tuple[int, int]] = field(default_factory=list)
    num_items: int = 0
    notes: list[str] = field(default_factory=list)
    kind: Format | None = None
    unused: list[str] = field(default_factory=list)
    columns: dict[str, np.ndarray] | None = None


def num_supervised(labels: np.ndarray) -> int:
    """Tokens that are predicted: labels from the second on (nothing comes before the first) that are not -100."""
    return int(np.count_nonzero(labels[1:] != IGNORED))


def fingerprint(tokens: Tokens) -> bytes:
    """A hash of a row's ids, labels and positions, 8 bytes."""
    parts = [tokens.input_ids, tokens.labels, *([] if tokens.position_ids is None else [tokens.position_ids])]
    return hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in parts)).digest()[:8]


def find_format(
    items: Sequence[Item], name: str, columns: Mapping[str, str] | None = None
) -> tuple[Format | None, bool]:
    """The format of the first of ``items`` that has one, and whether that is certain: of no turns it is not."""
    guess: Format | None = None
    for item in items:
        try:
            value = renamed(parse(item, name).value, columns)
        except BadRow:
            continue
        kind = format_of(value)
        if kind is not None and not (kind in ("messages", "sharegpt") and has_no_turns(value)):
            return kind, True
        guess = guess or kind
    return guess, False


def tokenise(items: Sequence[Item], name: str, kind: Format | None, encode: RowEncoder, limits: Limits) -> Chunk:
    """The rows of ``items``, which follow each other in the file ``name``.

    Raises:
        ConfigError: an encoding other than UTF-8, or rows for which there is no tokenizer or template.
    """
    chunk = Chunk(num_items=len(items), kind=kind)
    records = [parse(item, name) for item in items]
    read = [_read(record, kind, limits) for record in records]
    encoded = iter(encode.many([row for row in read if not isinstance(row, BadRow)]))
    for record, row in zip(records, read, strict=True):
        tokens = row if isinstance(row, BadRow) else next(encoded)
        if not isinstance(tokens, BadRow):
            _add(chunk, record.line, tokens, limits, isinstance(row, Conversation))
            continue
        chunk.bad.append((record.line, str(tokens)))
        if record.is_last:
            chunk.hopeless = chunk.bad[-1]
    chunk.notes, encode.notes = encode.notes, []
    used = [record.value for record, row in zip(records, read, strict=True) if not isinstance(row, BadRow)]
    chunk.unused = list(dict.fromkeys(key for value in used for key in _unused(value, kind, limits.columns)))
    return chunk


def _read(record: Record, kind: Format | None, limits: Limits) -> Sample | BadRow:
    """A record in the inner form, or why it has none."""
    try:
        if record.error:
            raise BadRow(record.error)
        value = renamed(record.value, limits.columns)
        check_format(value, kind)
        assert kind is not None
        return read_row(value, kind, limits.vocab_size, limits.max_positions)
    except BadRow as error:
        return error


def _unused(value: dict[str, Any], kind: Format | None, columns: Mapping[str, str] | None) -> list[str]:
    """Columns with text that are not looked at, by the names that they have in the file."""
    if kind is None:
        return []
    known = renamed(value, columns)
    if not columns:
        return unused_columns(known, kind)
    taken = {columns[key] for key in known.keys() - unused_columns(known, kind)}
    return [key for key, text in value.items() if key not in taken and isinstance(text, str) and text.strip()]


def _add(chunk: Chunk, line: int, tokens: Tokens, limits: Limits, is_talk: bool) -> None:
    """Keep a row, cut it, or note why it is left out."""
    length, whole = len(tokens.input_ids), fingerprint(tokens)
    if limits.tokens is not None and length > limits.tokens:
        pieces = split(tokens, limits.tokens) if limits.on_long == "split" and not is_talk else None
        if pieces is not None:
            chunk.split.append((line, length))
            chunk.rows += pieces
            chunk.lines += [line] * len(pieces)
            chunk.fingerprints += map(fingerprint, pieces)
            return
        # A row whose answer would not stay whole teaches what is wrong: dropped and counted.
        cut = shorten(tokens, limits.tokens) if limits.on_long == "truncate" else None
        if limits.on_long in ("refuse", "split"):
            chunk.refused.append((line, length))
            return
        if cut is None:
            chunk.dropped.append((line, length))
            return
        chunk.truncated.append((line, length))
        tokens = cut
    chunk.rows.append(tokens)
    chunk.lines.append(line)
    chunk.fingerprints.append(whole)
