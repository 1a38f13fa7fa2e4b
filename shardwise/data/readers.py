"""Open a data file or a folder of them, whatever format it is in, and hand out its items with the lines they stand on.

What a file is, its content says first and its name second: an array of JSON named ``.jsonl`` is read as an array. Only
a JSON array is read as a whole; everything else is read piece by piece.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
import sys
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from shardwise.data.columns import JSON_COLUMNS
from shardwise.data.detect import format_of
from shardwise.data.memory import plain_row
from shardwise.data.packed import AHEAD, BROKEN, open_unpacked
from shardwise.data.source import (
    BOM,
    Item,
    Raw,
    Record,
    array_records,
    convert,
    decode,
    local,
    object_records,
    parse,
    show,
    unlocal,
)
from shardwise.errors import ConfigError
from shardwise.spec.data_files import SUFFIXES, data_suffix, named_paths

_BATCH = 1000  # rows of a table that are in memory at once
_PARQUET, _ARROW = b"PAR1", (b"ARROW1", b"\xff\xff\xff\xff")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# What a folder of a hub holds beside its rows.
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"  # what the library datasets writes into a folder


def read_records(path: Path, max_records: int | None = None) -> list[Record]:
    """The records of a file in its order, at most ``max_records``; blank lines are no records.

    Raises:
        ConfigError: a file that is absent, of another kind or encoding, or that cannot be read.
    """
    return [parse(item, show(path)) for item in islice(iter_items(path), max_records)]


def files_of(path: Path) -> list[Path]:
    """The data files that a path stands for: itself, or in order of their names those in a folder and below it, or
    those that it is the pattern of.

    A folder that the library ``datasets`` has saved stands for its parts, in their own order.

    Raises:
        ConfigError: nothing is there, a folder without data files or that cannot be read, or links in a circle.
    """
    place = local(path)
    if place.is_file():
        return [path]
    if not place.is_dir():
        named = [unlocal(one) for one in named_paths(place)]
        if not named:
            raise _absent(path)
        return [file for one in named for file in files_of(one)]
    if (place / _SAVED_SPLITS).is_file():
        splits = sorted(entry.name for entry in place.iterdir() if (entry / _SAVED).is_file())
        rule = f"is a folder of the splits {', '.join(splits)}"
        first = "train" if "train" in splits else next(iter(splits), "SPLIT")
        raise ConfigError(show(path), rule, f"Name one of them: {show(path)}/{first}")
    if (place / _SAVED).is_file():
        return [path / name for name in _saved_parts(path)]
    found = sorted(_below(place))
    if not found:
        raise ConfigError(show(path), "is a folder without data files", f"Data files end in {', '.join(SUFFIXES)}")
    return found


def _below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Data files in a folder and below it, through links, too; hidden files and folders are left out."""
    real = folder.resolve()
    if real in above:
        raise ConfigError(show(folder), "is a link to a folder that it lies in", "Remove the link")
    try:
        entries = [(entry, entry.is_dir()) for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise ConfigError(show(folder), f"the folder cannot be read ({error.strerror})") from None
    for entry, is_folder in entries:
        if is_folder:
            yield from _below(entry, (*above, real))
        elif _is_data(entry.name):
            yield entry


def _is_data(name: str) -> bool:
    return bool(data_suffix(name)) and name not in _NO_ROWS


def _saved_parts(path: Path) -> list[str]:
    try:
        state = json.loads((local(path) / _SAVED).read_text(encoding="utf-8"))
        return [str(part["filename"]) for part in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"its {_SAVED} is none of the library datasets ({type(error).__name__})"
        raise ConfigError(show(path), rule, "Save the data set again, with save_to_disk") from None


def _absent(path: Path) -> ConfigError:
    try:
        siblings = [name for name in os.listdir(local(path).parent) if _is_data(name)]
    except OSError:
        siblings = []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return ConfigError(
        show(path), "there is no such data file", f"Nearest name there: {show(Path(near[0]))}" if near else ""
    )


def iter_items(path: Path) -> Iterator[Item]:
    """The items of one file in its order.

    Raises:
        ConfigError: as :func:`read_records`; an encoding other than UTF-8 is met where it stands.
    """
    name = show(path)
    try:
        with open_unpacked(local(path), name) as file:
            start = file.peek(AHEAD)  # type: ignore[attr-defined]
            if start.startswith((_PARQUET, *_ARROW)):
                yield from _table_rows(path, is_parquet=start.startswith(_PARQUET))
            elif start.startswith(_UTF16):
                raise ConfigError(f"{name}:1", "the file is UTF-16; data files are UTF-8", convert(name, "UTF-16"))
            else:
                yield from _text_items(path, file, start)
    except FileNotFoundError:
        raise _absent(path) from None
    except (OSError, zlib.error, *BROKEN) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(name, f"the data file cannot be read ({reason})") from None


def _text_items(path: Path, file: IO[bytes], start: bytes) -> Iterator[Item]:
    suffix = data_suffix(path.name)
    first = start.removeprefix(BOM).lstrip()
    if suffix in (".csv", ".tsv") and not _is_json_line(first):
        return _cells(path, file, start, suffix)
    if suffix == ".txt" and not _is_json_line(first):
        return _lines_of_text(path, file)
    if first.startswith(b"[") and (suffix == ".json" or not _is_lines_of_lists(first)):
        return array_records(decode(file.read(), show(path)))
    if suffix == ".json" and first.startswith(b"{"):
        _refuse_object(path, file)
        if _is_object_of_lines(first):
            return object_records(decode(file.read(), show(path)))
    if not suffix and first[:1] not in (b"{", b"[", b""):
        raise ConfigError(show(path), f"a data file ends in {', '.join(SUFFIXES)}, or holds JSON", "Convert it")
    return _json_lines(file)


def _is_json_line(start: bytes) -> bool:
    """Whether the first line is an object by itself; of a line longer than what was read ahead its begin decides."""
    line, newline, _ = start.partition(b"\n")
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line.rstrip().rstrip(b",")), dict)
    except (ValueError, RecursionError):
        return not newline


def _is_lines_of_lists(start: bytes) -> bool:
    """Whether a file that begins with a list goes on with others, so that it is lines and no array."""
    line, _, rest = start.partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(line), list)
    except (ValueError, RecursionError):
        return False


def _json_lines(file: IO[bytes]) -> Iterator[Item]:
    # By \n alone: str.splitlines also breaks at U+2028 and others, which may stand inside a JSON string.
    for number, whole in enumerate(file, start=1):
        line = whole.removeprefix(BOM) if number == 1 else whole
        if line.strip():
            yield Raw(number, line)


def _lines_of_text(path: Path, file: IO[bytes]) -> Iterator[Item]:
    name = show(path)
    for number, line in enumerate(file, start=1):
        text = decode(line, name, number).strip("\r\n")
        if text.strip():
            yield Record(number, {"text": text})


def _is_object_of_lines(start: bytes) -> bool:
    """Whether a file begins with an object over several lines."""
    text = start.decode("utf-8", "ignore")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _refuse_object(path: Path, file: IO[bytes]) -> None:
    """A ``.json`` file that is one object, of which a part holds the rows."""
    try:
        value = json.loads(decode(file.peek(), show(path)))  # type: ignore[attr-defined]
    except (ValueError, RecursionError, ConfigError):
        return
    lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    if format_of(value) is None and lists:
        rule = "the file is one object; expected an array of rows, or one row a line"
        raise ConfigError(f"{show(path)}:1", rule, f"Its rows may be its {lists[0]!r}: save that alone")


def _cells(path: Path, file: IO[bytes], start: bytes, suffix: str) -> Iterator[Item]:
    """Rows of a table in text. Its first row names the columns; a quoted cell may hold line breaks."""
    name = show(path)
    header = start.partition(b"\n")[0]
    separators = "\t,;|" if suffix == ".tsv" else ",;\t|"
    delimiter = max(separators, key=lambda sign: header.count(sign.encode()))
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_decoded_lines(file, name), delimiter=delimiter, strict=True)
    columns: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            is_last = reader.line_num > line  # a quote that is not closed has taken other rows in
            yield Record(line, error=f"not a row of a table: {error}", is_last=is_last)
            continue
        if not columns:
            columns = _columns(name, cells)
        elif len(cells) != len(columns):
            if cells and any(cell.strip() for cell in cells):
                yield Record(line, error=f"has {len(cells)} cells for {len(columns)} columns")
        else:
            pairs = zip(columns, cells, strict=True)
            yield Record(line, dict(cell for key, text in pairs if key for cell in _cell(key, text)))


def _decoded_lines(file: IO[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        yield decode(line, name, number)


def _columns(name: str, cells: list[str]) -> list[str]:
    columns = [cell.strip() for cell in cells]
    twice = next((column for column in columns if column and columns.count(column) > 1), None)
    if twice is not None:
        raise ConfigError(f"{name}:1", f"two columns have the name {twice!r}", "Rename one of them")
    return columns


def _cell(key: str, text: str) -> list[tuple[str, Any]]:
    """A cell under its column; none where a column that would hold JSON is empty."""
    starts = text.lstrip()[:1]
    if key in JSON_COLUMNS and not starts:
        return []
    if (key in JSON_COLUMNS and starts in "[{") or (key in ("prompt", "completion") and text.startswith("[{")):
        try:
            return [(key, json.loads(text))]
        except (ValueError, RecursionError):
            pass  # a text that only begins like JSON; the format's own check says what was expected
    return [(key, text)]


def _table_rows(path: Path, *, is_parquet: bool) -> Iterator[Item]:
    """Rows of a parquet or Arrow file; ``line`` is the number of the row, from 1."""
    name = show(path)
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        kind = "parquet" if is_parquet else "Arrow"
        raise ConfigError(name, f"{kind} needs the package pyarrow", "Install it: pip install pyarrow") from None
    number = 0
    try:
        for batch in _parquet(local(path)) if is_parquet else _arrow(local(path)):
            for row in batch.to_pylist():
                number += 1
                yield Record(number, plain_row(row))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        rule = f"the file is broken after row {number} ({str(error).splitlines()[0][:200]})"
        raise ConfigError(name, rule, "Write it again") from None


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH)


def _arrow(path: Path) -> Iterator[Any]:
    """Both of Arrow's layouts: with a footer, and as a stream, which the library ``datasets`` writes."""
    import pyarrow.ipc

    with path.open("rb") as head:
        has_footer = head.read(6) == _ARROW[0]
    with path.open("rb") as file:
        if has_footer:
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(file))
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH):
                yield batch.slice(start, _BATCH)
