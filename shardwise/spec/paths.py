"""Names of files as a user gives them: by their UTF-8 bytes, and only those that a file system takes."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import ConfigError

_MAX_NAME, _MAX_PATH = 255, 4096  # bytes, of a part of a path and of all of it (linux/limits.h)
_SHOWN = 60  # letters of a name that is too long


def local_path(name: str) -> Path:
    """The path of this name by its UTF-8 bytes: under LC_ALL=C the interpreter does not encode what is no ASCII."""
    return Path(os.fsdecode(name.encode("utf-8", "surrogateescape")))


def is_path(name: str) -> bool:
    """Whether a file system could take the name: asking one about others is an error, not a no."""
    encoded = name.encode("utf-8", "surrogateescape")
    return max(map(len, encoded.split(b"/"))) <= _MAX_NAME and len(encoded) <= _MAX_PATH and b"\0" not in encoded


def check_path(key: str, name: str | None) -> None:
    """Refuse a name that no file system takes.

    Raises:
        ConfigError: the key, the beginning of its value, and the limit.
    """
    if name is None or is_path(name):
        return
    shown = f"{key} = {name[:_SHOWN]!r}" + ("..." if len(name) > _SHOWN else "")
    if "\0" in name:
        raise ConfigError(shown, "holds a zero byte, which no path can", "Remove it")
    rule = f"is too long for a path ({len(name)} letters)"
    raise ConfigError(shown, rule, f"The most are {_MAX_NAME} bytes between two slashes, and {_MAX_PATH} in all")
