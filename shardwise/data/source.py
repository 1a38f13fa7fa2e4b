"""JSON as files hold it, line by line or as one array, and the bytes below it: UTF-8 whatever the locale says.

A broken line is a record with an error: the caller decides whether it stops the run. ``readers`` opens files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

_WHITESPACE = " \t\r\n"
_MARK = "\ufeff"
BOM = _MARK.encode()


@dataclass(frozen=True, slots=True)
class Record:
    """One item of a file: its ``value``, or the ``error`` that says why it has none.

    ``is_last``: what follows the error in the file cannot be read, so leaving the row out would lose others unseen.
    """

    line: int
    value: Any = None
    error: str = ""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Raw:
    """One line of a file of JSON lines, not looked at yet: reading it is work for the process that tokenises it."""

    line: int
    data: bytes


Item = Record | Raw


def show(path: Path) -> str:
    """The path as text that can be written as UTF-8, also when it came as undecodable bytes of the command line."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def local(path: Path) -> Path:
    """The path by its UTF-8 bytes: under LC_ALL=C the interpreter would refuse to encode a name that is not ASCII."""
    return Path(os.fsdecode(os.fspath(path).encode("utf-8", "surrogateescape")))


def unlocal(path: Path) -> Path:
    """The path of which :func:`local` makes ``path``."""
    return Path(os.fsencode(path).decode("utf-8", "surrogateescape"))


def parse(item: Item, name: str) -> Record:
    """The record of an item; ``name`` is the file's, for messages.

    Raises:
        ConfigError: bytes that are not UTF-8, with their line.
    """
    if isinstance(item, Record):
        return item
    # Files that were put one behind the other may have a mark in the middle.
    return parse_line(item.line, decode(item.data, name, item.line).strip().removeprefix(_MARK))


def decode(data: bytes, name: str, line: int = 1) -> str:
    """Text of ``data``, which begins on ``line``: UTF-8, with or without a byte order mark.

    Raises:
        ConfigError: another encoding, with the line and what it may be.
    """
    try:
        return data.removeprefix(BOM).decode("utf-8") if line == 1 else data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
    try:
        data.decode("gb18030")
        guess, remedy = " (it reads as GBK)", convert(name, "GB18030")
    except UnicodeDecodeError:
        guess, remedy = "", "Save it as UTF-8"
    raise ConfigError(f"{name}:{line}", f"the file is not UTF-8{guess}", remedy)


def convert(name: str, encoding: str) -> str:
    """The command that makes UTF-8 of a file."""
    return f"Convert it: iconv -f {encoding} -t UTF-8 {name}"


def parse_line(number: int, line: str) -> Record:
    """The record of one line of JSON."""
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


def array_records(text: str) -> Iterator[Record]:
    """The items of one JSON array, decoded one by one so that each has its line; an error ends them."""
    decoder, is_first = json.JSONDecoder(), True
    position = _skip(text, _skip(text, 0) + 1)
    line, counted = 1, 0
    closed = text[position : position + 1] == "]"
    if closed:
        position = _skip(text, position + 1)
    while not closed:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            comma = not is_first and text[position : position + 1] == "]"
            yield Record(line, error="a comma before the closing ]" if comma else _reason(error), is_last=not comma)
            return
        yield Record(line, value)
        is_first = False
        position = _skip(text, end)
        closed = text[position : position + 1] == "]"
        if not closed and text[position : position + 1] != ",":
            line += text.count("\n", counted, position)
            yield Record(line, error="not JSON: the array goes on without a comma or a closing ]", is_last=True)
            return
        position = _skip(text, position + 1)
    if position < len(text):
        line += text.count("\n", counted, position)
        yield Record(line, error="not JSON: something follows the array", is_last=True)


def object_records(text: str) -> Iterator[Record]:
    """Objects that follow each other, each over as many lines as it likes; an error ends them."""
    decoder, position, line, counted = json.JSONDecoder(), _skip(text, 0), 1, 0
    while position < len(text):
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield Record(line, error=_reason(error), is_last=True)
            return
        yield Record(line, value)
        position = _skip(text, end)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITESPACE:
        position += 1
    return position
