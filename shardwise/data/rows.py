"""The rows of a data set as the run uses them: read, checked against the model, cut to length, numbered."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.chat import ChatEncoder
from shardwise.data.cut import shorten
from shardwise.data.format import (
    FORMATS,
    IGNORED,
    BadRow,
    Format,
    Tokens,
    check_format,
    check_ids,
    format_of,
    read_tokens,
)
from shardwise.data.pairs import PairEncoder
from shardwise.data.source import Record, read_records, show
from shardwise.errors import ConfigError
from shardwise.spec.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_SHOWN = 3  # bad rows that one message spells out
_SHOWN_RANGES = 20
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the data set.

    ``index`` is its place among the rows in use, in file order; ``line`` where it stands in the file. ``input_ids``,
    ``labels`` (unshifted, -100: not supervised) and ``position_ids`` (None: 0, 1, 2, ...) are int32 [length].
    ``fingerprint`` is a hash of all three before the row was cut to length.
    """

    index: int
    line: int
    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None
    fingerprint: str = ""


def _fingerprint(tokens: Tokens) -> str:
    parts = [tokens.input_ids, tokens.labels, *([] if tokens.position_ids is None else [tokens.position_ids])]
    return hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in parts)).hexdigest()[:16]


def row_hash(row: Row) -> str:
    """First 16 hexadecimal digits of the sha256 of the ids as little-endian int32."""
    return hashlib.sha256(row.input_ids.astype("<i4").tobytes()).hexdigest()[:16]


def num_supervised(labels: np.ndarray) -> int:
    """Tokens that are predicted: labels from the second on (nothing comes before the first) that are not -100."""
    return int(np.count_nonzero(labels[1:] != IGNORED))


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


def load_rows(
    path: Path,
    run: RunConfig,
    *,
    vocab_size: int,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    max_positions: int | None = None,
    records: list[Record] | None = None,
    max_samples: int | None = None,
    notify: Notify = _log.warning,
) -> list[Row]:
    """The rows of ``path`` that the run uses, in file order.

    Args:
        records: what stands in for the file's content; ``path`` is then no more than its name in messages.
        vocab_size: rows of the model's embedding; every id is below it.
        tokenizer: gives the tokenizer; called only if the rows are text.
        max_samples: read no more than the first so many rows.
        max_positions: longest row that the model can take; ``data.max_length`` can only lower it.
        notify: told, in one line each, of rows that are skipped, dropped or truncated.

    Raises:
        ConfigError: a file that cannot be read, bad rows (unless ``data.on_bad_rows`` is skip), rows that are too
            long (unless ``data.on_long`` says what to do with them), or a set in which nothing can be learned.
    """
    data, name = run.data, show(path)
    if records is None:
        records = read_records(path, max_samples)
    if not records:
        raise ConfigError(name, "the data file holds no rows" if path.suffix else "holds no rows")
    kind = _kind(records, data.format)
    encode = _encoder(kind, run, vocab_size, tokenizer, max_positions, lambda text: notify(f"{name}: {text}"))
    limit = _Limit.of(data.max_length, max_positions)
    sorted_ = _sort(records, kind, encode, limit, data.on_long)
    if sorted_.bad and (data.on_bad_rows == "refuse" or not sorted_.rows):
        raise _bad_rows(name, sorted_, len(records), skipping=data.on_bad_rows == "skip")
    if sorted_.refused:
        line, length = next(iter(sorted_.refused.items()))
        more = f" ({len(sorted_.refused)} such rows, the longest {max(sorted_.refused.values())})"
        remedy = "Cut them with data.on_long=truncate, leave them out with data.on_long=drop"
        raise ConfigError(f"{name}:{line}", f"{length} tokens are more than {limit}{more}", remedy)
    _tell(sorted_, name, limit, notify)
    if not any(num_supervised(row.labels) for row in sorted_.rows):
        rule = f"none of {len(records)} rows has a supervised token, there is nothing to learn"
        raise ConfigError(name, rule + (f" within {limit}" if sorted_.dropped else ""), "Look at the rows' labels")
    return sorted_.rows


@dataclass(frozen=True)
class _Limit:
    """The longest row, and which key says so."""

    tokens: int | None
    source: str = ""

    @classmethod
    def of(cls, max_length: int | None, max_positions: int | None) -> _Limit:
        if max_length is not None and (max_positions is None or max_length <= max_positions):
            return cls(max_length, f"data.max_length = {max_length}")
        return cls(max_positions, f"the model's {max_positions} positions")

    def __str__(self) -> str:
        return self.source


@dataclass
class _Sorted:
    """Rows in use, and by line what became of the others."""

    rows: list[Row] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)  # line: reason
    refused: dict[int, int] = field(default_factory=dict)  # line: length
    dropped: dict[int, int] = field(default_factory=dict)
    truncated: dict[int, int] = field(default_factory=dict)


def _kind(records: list[Record], given: str) -> Format | None:
    """The format of the file: the given one; for ``auto`` that of its first row that has one."""
    named = next((name for name in FORMATS if name == given), None)
    return named or next((kind for record in records if (kind := format_of(record.value))), None)


def _encoder(
    kind: Format | None,
    run: RunConfig,
    vocab_size: int,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    max_positions: int | None,
    notify: Notify,
) -> Callable[[dict[str, Any]], Tokens]:
    if kind not in ("messages", "pairs"):
        return lambda value: read_tokens(value, vocab_size, max_positions)
    encoder: ChatEncoder | PairEncoder
    if kind == "messages":
        encoder = ChatEncoder(tokenizer(), run.chat_template, run.data.loss)
        if encoder.default_template is not None:
            notify(f"the tokenizer has no chat template, so this one is used: {encoder.default_template!r}")
    else:
        encoder = PairEncoder(tokenizer(), run.chat_template, run.data.loss)
        if encoder.is_plain:
            notify("the tokenizer has no chat template: a row is its question, a line break, and its answer")

    def encode(value: dict[str, Any]) -> Tokens:
        tokens = encoder(value)
        check_ids(tokens.input_ids, vocab_size, "the tokenizer's id")
        return tokens

    return encode


def _sort(
    records: list[Record],
    kind: Format | None,
    encode: Callable[[dict[str, Any]], Tokens],
    limit: _Limit,
    on_long: str,
) -> _Sorted:
    out = _Sorted()
    for record in records:
        try:
            if record.error:
                raise BadRow(record.error)
            check_format(record.value, kind)
            tokens = encode(record.value)
        except BadRow as error:
            out.bad[record.line] = str(error)
            continue
        length, fingerprint = len(tokens.input_ids), _fingerprint(tokens)
        if limit.tokens is not None and length > limit.tokens:
            # A row whose answer would not stay whole teaches what is wrong: dropped and counted.
            cut = shorten(tokens, limit.tokens) if on_long == "truncate" else None
            fate = out.refused if on_long == "refuse" else out.dropped if cut is None else out.truncated
            fate[record.line] = length
            if cut is None:
                continue
            tokens = cut
        parts = tokens.input_ids, tokens.labels, tokens.position_ids
        out.rows.append(Row(len(out.rows), record.line, *parts, fingerprint))
    return out


def _bad_rows(name: str, found: _Sorted, total: int, *, skipping: bool) -> ConfigError:
    """One message for all bad rows: the first few spelled out, the rest counted."""
    if skipping:
        return ConfigError(name, f"no valid rows: {len(found.bad)} left out because {_by_reason(found.bad)}")
    if len(found.bad) == 1:
        ((line, reason),) = found.bad.items()
        return ConfigError(f"{name}:{line}", reason, "Correct it")
    lines = [f"{name}:{line}: {reason}" for line, reason in list(found.bad.items())[:_SHOWN]]
    if len(found.bad) > _SHOWN:
        lines.append(f"and {len(found.bad) - _SHOWN} more")
    rule = f"{len(found.bad)} of {total} rows cannot be used"
    return ConfigError(name, rule, "\n  ".join(["Correct them:", *lines]))


def _by_reason(bad: dict[int, str]) -> str:
    counted = Counter(bad.values()).most_common()
    shown = [f"{reason} ({count})" for reason, count in counted[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(counted) - _SHOWN} other reasons" if len(counted) > _SHOWN else "")


def _tell(found: _Sorted, name: str, limit: _Limit, notify: Notify) -> None:
    if found.bad:
        notify(
            f"{name}: {len(found.bad)} bad rows left out, the first on line {next(iter(found.bad))}: "
            f"{_by_reason(found.bad)}"
        )
    if found.dropped:
        notify(
            f"{name}: {len(found.dropped)} rows longer than {limit} dropped, "
            f"the first on line {next(iter(found.dropped))}"
        )
    if found.truncated:
        notify(f"{name}: {len(found.truncated)} rows cut to {limit}, the first on line {next(iter(found.truncated))}")
