"""Token rows as a few flat arrays, in memory or in files that every process of a machine maps and none holds."""

from __future__ import annotations

import hashlib
import io
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from shardwise.data.format import IGNORED
from shardwise.data.tokenise import Chunk, num_supervised

_META = "meta.json"
# One value a token, and one a row; all little-endian, so that a file reads the same everywhere.
_BY_TOKEN = {"input_ids": "<i4", "labels": "<i4", "position_ids": "<i4"}
_BY_ROW = {"lengths": "<i4", "supervised": "<i4", "lines": "<i8", "files": "<i4", "prints": ">u8"}
_COLUMNS = _BY_TOKEN | _BY_ROW


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the data set.

    ``index`` is its place among the rows in use; ``line`` where it stands in its ``file``. ``input_ids``,
    ``labels`` (unshifted, -100: not supervised) and ``position_ids`` (None: 0, 1, 2, ...) are int32 [length].
    ``fingerprint`` is a hash of all three before the row was cut to length.
    """

    index: int
    line: int
    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None
    fingerprint: str = ""
    file: str = ""


class Store:
    """Rows over flat arrays, as they were written.

    Args:
        columns: name -> array; those of a token are concatenated over all rows. ``position_ids`` is empty where no
            row has its own.
        files: names of the files that the column ``files`` counts.
    """

    def __init__(self, columns: dict[str, np.ndarray], files: Sequence[str]) -> None:
        self.columns, self.files = columns, tuple(files)
        self._plain = {name: np.asarray(column) for name, column in columns.items()}  # a slice of a memmap costs more
        self._starts = np.concatenate([[0], np.cumsum(columns["lengths"], dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.columns["lengths"])

    def row(self, place: int, index: int) -> Row:
        """The row at ``place``, numbered ``index``."""
        start, end = int(self._starts[place]), int(self._starts[place + 1])
        columns = self._plain
        positions = columns["position_ids"][start:end] if len(columns["position_ids"]) else None
        if positions is not None and positions[0] < 0:  # none of its own, beside rows that have some
            positions = None
        ids, labels = columns["input_ids"][start:end], columns["labels"][start:end]
        shown, file = f"{int(columns['prints'][place]):016x}", self.files[int(columns["files"][place])]
        return Row(index, int(columns["lines"][place]), ids, labels, positions, shown, file)

    def __getstate__(self) -> dict[str, Any]:
        """Mapped arrays travel as what they hold: another machine may not see the files."""
        return {"columns": {name: np.array(column) for name, column in self.columns.items()}, "files": self.files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["columns"], state["files"])  # type: ignore[misc]


class Rows(Sequence[Row]):
    """The rows of one store or of several. Taking some of them, in any order and number, copies no token.

    Args:
        stores: where they lie.
        order: which of them stand here, counted over all stores, int64; None: all.

    Attributes:
        lengths: tokens of each row, int64 [rows].
        supervised: supervised tokens of each row, int64 [rows].
    """

    def __init__(self, stores: Sequence[Store], order: np.ndarray | None = None) -> None:
        self.stores, self.order = tuple(stores), order
        self._firsts = list(accumulate((len(store) for store in stores), initial=0))
        self.lengths = self._column("lengths").astype(np.int64)
        self.supervised = self._column("supervised").astype(np.int64)

    def _column(self, name: str) -> np.ndarray:
        whole = np.concatenate([np.asarray(store.columns[name]) for store in self.stores])
        return whole if self.order is None else whole[self.order]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        place = range(len(self))[index]
        stored = place if self.order is None else int(self.order[place])
        part = bisect_right(self._firsts, stored) - 1
        return self.stores[part].row(stored - self._firsts[part], place)

    def take(self, places: np.ndarray) -> Rows:
        """The rows at these places, in this order; a place may stand there several times."""
        return Rows(self.stores, (places if self.order is None else self.order[places]).astype(np.int64))

    @property
    def fingerprint(self) -> str:
        """Names the rows in their order by what they were before they were cut to length."""
        return hashlib.sha256(self._column("prints").astype(">u8").tobytes().hex().encode()).hexdigest()[:16]


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several sources, one source after the other."""
    firsts = accumulate((sum(map(len, part.stores)) for part in parts), initial=0)
    orders = [
        first + (np.arange(len(part)) if part.order is None else part.order)
        for first, part in zip(firsts, parts, strict=False)
    ]
    return Rows([store for part in parts for store in part.stores], np.concatenate(orders).astype(np.int64))


def columns_of(chunk: Chunk) -> dict[str, np.ndarray]:
    """The rows of a chunk, which has some, as flat arrays by the names of columns; of one that is flat what it has.

    ``position_ids`` are there where a row has its own; those of the others are -1.
    """
    if chunk.columns is not None:
        return dict(chunk.columns)
    rows = chunk.rows
    labels = np.concatenate([row.labels for row in rows]).astype(np.int32, copy=False)
    lengths = np.array([len(row.labels) for row in rows], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    learned = labels != IGNORED
    learned[(ends - lengths)[lengths > 0]] = False  # nothing comes before the first
    counts = np.concatenate([[0], np.cumsum(learned, dtype=np.int64)])
    columns = {
        "input_ids": np.concatenate([row.input_ids for row in rows]).astype(np.int32, copy=False),
        "labels": labels,
        "lengths": lengths,
        "supervised": counts[ends] - counts[ends - lengths],
    }
    if any(row.position_ids is not None for row in rows):
        given = (row.position_ids for row in rows)
        parts = (np.full(n, -1, np.int32) if own is None else own for own, n in zip(given, lengths, strict=True))
        columns["position_ids"] = np.concatenate(list(parts))
    return columns


def flattened(chunk: Chunk) -> Chunk:
    """The same chunk with its rows as flat arrays, which are sent to another process for a fraction of the cost."""
    return replace(chunk, rows=[], columns=columns_of(chunk)) if chunk.lines else chunk


class RowsWriter:
    """Takes rows chunk by chunk and keeps no token of those that it has written.

    Args:
        folder: where the files go; None: everything stays in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._out: dict[str, IO[bytes]] = {name: self._open(name) for name in _COLUMNS}
        self._has_positions = False
        self.num_rows = self.num_tokens = self.num_learned = 0

    def _open(self, name: str) -> IO[bytes]:
        return io.BytesIO() if self._folder is None else _file(self._folder, name).open("w+b")

    def add(self, chunk: Chunk, file: int) -> None:
        """Append the rows of a chunk of file number ``file``."""
        if not chunk.lines:
            return
        columns = columns_of(chunk)
        positions = columns.pop("position_ids", None)
        for name, values in columns.items():
            self._write(name, values)
        if positions is not None and not self._has_positions:
            self._has_positions = True
            self._write("position_ids", np.full(self.num_tokens, -1))
        number = len(columns["input_ids"])
        if self._has_positions:  # once any row has its own, those of the others are -1
            self._write("position_ids", np.full(number, -1) if positions is None else positions)
        self.num_tokens += number
        self.num_learned += int(np.count_nonzero(columns["supervised"]))
        self._write("lines", chunk.lines)
        self._write("files", [file] * len(chunk.lines))
        self._out["prints"].write(b"".join(chunk.fingerprints))
        self.num_rows += len(chunk.lines)

    def _write(self, name: str, values: Any) -> None:
        self._out[name].write(np.asarray(values, dtype=_COLUMNS[name]).tobytes())

    def finish(self, files: Sequence[str], more: dict[str, Any] | None = None) -> Rows:
        """The rows; what lies in files is described beside them, with ``more``."""
        if self._folder is None:
            held = {name: np.frombuffer(out.getvalue(), _COLUMNS[name]) for name, out in self._out.items()}  # type: ignore[attr-defined]
            return Rows([Store(held, files)])
        for out in self._out.values():
            out.close()
        meta = {"rows": self.num_rows, "tokens": self.num_tokens, "files": list(files), "more": more or {}}
        (self._folder / _META).write_text(json.dumps(meta), encoding="utf-8")
        return open_rows(self._folder)[0]


def open_rows(folder: Path) -> tuple[Rows, dict[str, Any]]:
    """The rows that a :class:`RowsWriter` has left in a folder, mapped, and what was said beside them.

    Raises:
        OSError, ValueError, KeyError: they are not all there.
    """
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    columns = {name: _mapped(_file(folder, name), kind) for name, kind in _COLUMNS.items()}
    counts = {name: meta["tokens" if name in _BY_TOKEN else "rows"] for name in _COLUMNS}
    for name, column in columns.items():
        if len(column) != counts[name] and not (name == "position_ids" and not len(column)):
            raise ValueError(f"{folder / name} holds {len(column)} values, expected {counts[name]}")
    return Rows([Store(columns, meta["files"])]), meta["more"]


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _mapped(path: Path, kind: str) -> np.ndarray:
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, dtype=kind)


def row_sizes(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """``(lengths, supervised tokens)`` of rows, int64 [rows] each."""
    if isinstance(rows, Rows):
        return rows.lengths, rows.supervised
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    return lengths, np.array([num_supervised(row.labels) for row in rows], dtype=np.int64)


def first_late(rows: Sequence[Row]) -> Row | None:
    """The first row with positions of its own that do not begin at 0."""
    if isinstance(rows, Rows) and not any(len(store.columns["position_ids"]) for store in rows.stores):
        return None
    return next((row for row in rows if row.position_ids is not None and row.position_ids[0] != 0), None)
