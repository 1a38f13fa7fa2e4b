"""The rows of a data set as the run uses them: read, checked against the model, cut to length, numbered."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.data.encode import RowEncoder
from shardwise.data.format import Format
from shardwise.data.readers import files_of, iter_items
from shardwise.data.source import Item, Record, show
from shardwise.data.store import Row, Rows, RowsWriter
from shardwise.data.tally import Notify, Tally
from shardwise.data.tokenise import Chunk, Limits, find_format, num_supervised, tokenise
from shardwise.spec.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Row", "Rows", "load_rows", "name_lines", "name_rows", "num_supervised", "row_hash"]

_log = logging.getLogger(__name__)
_SHOWN_RANGES, _SHOWN_FILES = 20, 5
CHUNK = 500  # items that are tokenised at once


def row_hash(row: Row) -> str:
    """First 16 hexadecimal digits of the sha256 of the ids as little-endian int32."""
    return hashlib.sha256(row.input_ids.astype("<i4").tobytes()).hexdigest()[:16]


def name_lines(lines: Sequence[int]) -> str:
    """``[7, 3, 4, 5]`` -> ``rows of lines 3-5, 7``, in file order; beyond some twenty ranges the rest is counted."""
    ranges: list[list[int]] = []
    for line in sorted(lines):
        if ranges and line <= ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_SHOWN_RANGES]]
    left = sum(last - first + 1 for first, last in ranges[_SHOWN_RANGES:])
    return f"{'row' if len(lines) == 1 else 'rows'} of {'line' if len(lines) == 1 else 'lines'} {', '.join(shown)}" + (
        f" and {left} more" if left else ""
    )


def name_rows(rows: Sequence[Row]) -> str:
    """``rows of lines 3-5, 7``; with the files behind them where there are several."""
    files = list(dict.fromkeys(row.file for row in rows))
    if len(files) <= 1:
        return name_lines([row.line for row in rows])
    parts = [f"{name_lines([row.line for row in rows if row.file == file])} of {file}" for file in files[:_SHOWN_FILES]]
    left = sum(row.file not in files[:_SHOWN_FILES] for row in rows)
    return ", ".join(parts) + (f" and {left} more" if left else "")


@dataclass(frozen=True)
class Limit:
    """The longest row, and which key says so."""

    tokens: int | None
    source: str = ""

    @classmethod
    def of(cls, max_length: int | None, max_positions: int | None) -> Limit:
        """The smaller of the two."""
        if max_length is not None and (max_positions is None or max_length <= max_positions):
            return cls(max_length, f"data.max_length = {max_length}")
        return cls(max_positions, f"the model's {max_positions} positions")

    def __str__(self) -> str:
        return self.source


@dataclass(frozen=True)
class Source:
    """A file, a folder or a name for rows in memory, and all that its tokens depend on but the tokenizer.

    ``vocab_size`` is the rows of the model's embedding, above every id; ``max_positions`` the longest row that the
    model can take (``data.max_length`` can only lower it); ``max_samples``: read no more than the first so many rows.
    For a look at rows (``is_look``) those that are too long refuse nothing: they are left out and counted.
    """

    path: Path
    run: RunConfig
    vocab_size: int
    max_positions: int | None = None
    max_samples: int | None = None
    is_look: bool = False

    @property
    def name(self) -> str:
        """As messages call it."""
        return show(self.path)

    @property
    def limit(self) -> Limit:
        """The longest row."""
        return Limit.of(self.run.data.max_length, self.max_positions)

    @property
    def limits(self) -> Limits:
        """What its rows are held against."""
        data = self.run.data
        return Limits(self.vocab_size, self.max_positions, self.limit.tokens, data.on_long, data.columns)

    def encoder(self, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> RowEncoder:
        """What makes tokens of its rows."""
        data = self.run.data
        return RowEncoder(tokenizer, self.run.chat_template, self.vocab_size, data.loss, data.chat_template_kwargs)


def load_rows(
    source: Source,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    records: Iterable[Record] | None = None,
    notify: Notify = _log.warning,
) -> Rows:
    """The rows of a source that the run uses, in their order, held in memory.

    Args:
        tokenizer: gives the tokenizer; called only if the rows are text.
        records: what stands in for the files' content; the path is then no more than their name in messages.
        notify: told, in one line each, of rows that are skipped, dropped or truncated.

    Raises:
        ConfigError: a file that cannot be read, bad rows (unless ``data.on_bad_rows`` is skip), rows that are too
            long (unless ``data.on_long`` says what to do with them), or a set in which nothing can be learned.
    """
    rows, told = survey_rows(source, tokenizer, records)
    for line in told["notes"]:
        notify(line)
    return rows


def survey_rows(
    source: Source,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    records: Iterable[Record] | None = None,
    folder: Path | None = None,
) -> tuple[Rows, dict[str, Any]]:
    """:func:`load_rows`, with what :func:`write_rows` says of them; into ``folder``, if one is given."""
    encode, limits, parts = source.encoder(tokenizer), source.limits, list(parts_of(source.path, records))
    found = (
        (number, file, tokenise(items, file, kind, encode, limits))
        for number, file, kind, items in chunks(parts, source.run.data.format, source.max_samples, limits.columns)
    )
    writer = RowsWriter(folder)
    told = write_rows(source, found, writer)
    return writer.finish([file for file, _ in parts], told), told


def write_rows(source: Source, found: Iterable[tuple[int, str, Chunk]], writer: RowsWriter) -> dict[str, Any]:
    """Write the rows of ``(number of the file, its name, chunk)``.

    Returns:
        ``notes``: what is to be said of them, in lines; ``counts``: :meth:`shardwise.data.tally.Tally.counts`.

    Raises:
        ConfigError: as :func:`load_rows`.
    """
    tally, notes = Tally(), list[str]()
    for number, file, chunk in found:
        writer.add(chunk, number)
        tally.add(chunk, file)
        notes += [note for note in chunk.notes if note not in notes]  # each process has its own
    limit, data = str(source.limit), source.run.data
    skips, splits = data.on_bad_rows == "skip", data.on_long == "split"
    tally.check(
        source.name,
        writer.num_rows,
        writer.num_learned,
        limit,
        skip_bad=skips,
        splits=splits,
        is_look=source.is_look,
    )
    told = [f"{source.name}: {line}" for line in [*notes, *tally.notes(source.name, limit)]]
    return {"notes": told, "counts": tally.counts()}


def parts_of(path: Path, records: Iterable[Record] | None = None) -> Iterator[tuple[str, Iterable[Item]]]:
    """``(name, items)`` of each file that a path stands for; with ``records`` they are what it stands for."""
    if records is not None:
        yield show(path), records
        return
    for file in files_of(path):
        yield show(file), iter_items(file)


def chunks(
    parts: Sequence[tuple[str, Iterable[Item]]],
    given: str,
    max_items: int | None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, str, Format | None, list[Item]]]:
    """``(number of the file, its name, its format, items)``, at most ``CHUNK`` items at once, ``max_items`` in all.

    ``given`` is ``data.format``; for ``auto`` the format of a file is that of its first row that has one, and rows in
    chunks before that have none. ``columns`` are the names that rows are read under.
    """
    left = max_items
    for number, (name, items) in enumerate(parts):
        waiting = iter(items)
        kind: Format | None = None if given == "auto" else given  # type: ignore[assignment]
        is_certain = kind is not None
        while left is None or left > 0:
            batch = list(islice(waiting, CHUNK if left is None else min(CHUNK, left)))
            if not batch:
                break
            if not is_certain:
                kind, is_certain = find_format(batch, name, columns)
            left = None if left is None else left - len(batch)
            yield number, name, kind, batch
