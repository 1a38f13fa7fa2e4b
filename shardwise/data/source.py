"""Read a data file into records: its JSON objects, each with the line it starts on.

Bytes are decoded here, as UTF-8 whatever the locale says, and a broken line is a record with an error: the caller
decides whether it stops the run.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

SUFFIXES = (".jsonl", ".json")
_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Record:
    """One item of a file: its JSON ``value``, or the ``error`` that says why it is not JSON."""

    line: int
    value: Any = None
    error: str = ""


def show(path: Path) -> str:
    """The path as text that can be written as UTF-8, also when it came as undecodable bytes of the command line."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_records(path: Path, max_records: int | None = None) -> list[Record]:
    """The records of ``path`` in file order, at most ``max_records``; blank lines are no records.

    ``.jsonl`` holds one object a line, ``.json`` one array.

    Raises:
        ConfigError: a file that is absent, of another kind or encoding, or whose content contradicts its name.
    """
    text = read_text(path)
    if path.suffix.lower() == ".json":
        records = _array_records(path, text)
    else:
        _refuse_array(path, text)
        records = _line_records(text, max_records)
    return records[:max_records]


def read_text(path: Path) -> str:
    """The whole file as text: UTF-8, with or without a byte order mark."""
    return _decode(path, _read_bytes(path))


def _read_bytes(path: Path) -> bytes:
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(show(path), f"a data file ends in {' or '.join(SUFFIXES)}", "Convert it to JSON lines")
    # By its UTF-8 bytes: under LC_ALL=C the interpreter would refuse to encode a name that is not ASCII.
    name = os.fsdecode(os.fspath(path).encode("utf-8", "surrogateescape"))
    try:
        return Path(name).read_bytes()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        remedy = f"Nearest name there: {show(Path(near[0]))}" if near else ""
        raise ConfigError(show(path), "there is no such data file", remedy) from None
    except OSError as error:
        raise ConfigError(show(path), f"the data file cannot be read ({error.strerror})") from None


def _siblings(path: Path) -> list[str]:
    try:
        return [name for name in os.listdir(path.parent) if name.endswith(SUFFIXES)]
    except OSError:
        return []


def _decode(path: Path, data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{show(path)}:1", "the file is UTF-16; data files are UTF-8", _convert(path, "UTF-16"))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    try:
        data.decode("gb18030")
        guess, remedy = " (it reads as GBK)", _convert(path, "GB18030")
    except UnicodeDecodeError:
        guess, remedy = "", "Save it as UTF-8"
    raise ConfigError(f"{show(path)}:{line}", f"the file is not UTF-8{guess}", remedy)


def _convert(path: Path, encoding: str) -> str:
    return f"Convert it: iconv -f {encoding} -t UTF-8 {show(path)}"


def _line_records(text: str, max_records: int | None) -> list[Record]:
    records: list[Record] = []
    # Not splitlines(): it also breaks at U+2028 and others, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if len(records) == max_records:
            break
        records.append(_parse_line(number, line.strip()))
    return records


def _parse_line(number: int, line: str) -> Record:
    try:
        return Record(number, json.loads(line))
    except (ValueError, RecursionError) as error:
        reason = _reason(error)
    if line.endswith(","):
        try:
            json.loads(line[:-1])
            reason = "a comma follows the object; JSON lines have none between rows"
        except (ValueError, RecursionError):
            pass
    return Record(number, error=reason)


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    return "not JSON that can be read: nested too deep" if isinstance(error, RecursionError) else f"not JSON: {error}"


def _refuse_array(path: Path, text: str) -> None:
    """A ``.jsonl`` file that is one array of objects gets one message, not one for each line."""
    if not text.lstrip().startswith("["):
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if value and isinstance(value[0], dict):
        rule = "the file is one JSON array; .jsonl holds one object a line"
        raise ConfigError(f"{show(path)}:1", rule, f"Rename it to {show(path.with_suffix('.json'))}")


def _array_records(path: Path, text: str) -> list[Record]:
    """The items of one JSON array, decoded one by one so that each has its line; an error ends the list."""
    start = _skip(text, 0)
    if text[start : start + 1] != "[":
        raise _no_array(path, text)
    decoder, records = json.JSONDecoder(), list[Record]()
    position = _skip(text, start + 1)
    line, counted = 1, 0
    closed = text[position : position + 1] == "]"
    if closed:
        position = _skip(text, position + 1)
    while not closed:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            comma = records and text[position : position + 1] == "]"
            return [*records, Record(line, error="a comma before the closing ]" if comma else _reason(error))]
        records.append(Record(line, value))
        position = _skip(text, end)
        closed = text[position : position + 1] == "]"
        if not closed and text[position : position + 1] != ",":
            line += text.count("\n", counted, position)
            return [*records, Record(line, error="not JSON: the array goes on without a comma or a closing ]")]
        position = _skip(text, position + 1)
    if position < len(text):
        line += text.count("\n", counted, position)
        records.append(Record(line, error="not JSON: something follows the array"))
    return records


def _no_array(path: Path, text: str) -> ConfigError:
    lines = text.strip().split("\n")
    several = len(lines) > 1 and lines[0].startswith("{") and not _parse_line(1, lines[0].strip()).error
    remedy = f"It looks like JSON lines: rename it to {show(path.with_suffix('.jsonl'))}" if several else ""
    return ConfigError(f"{show(path)}:1", "a .json data file holds one array of rows", remedy)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITESPACE:
        position += 1
    return position
