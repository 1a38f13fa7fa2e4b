"""Open a file that may be packed: by what it begins with, whatever its name is."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from shardwise.errors import ConfigError

AHEAD = 1 << 16  # bytes of a file that are looked at to know what it is


def _by_arrow(kind: str) -> Callable[[Path, str], Any]:
    """What the standard library cannot read."""

    def unpacked(path: Path, name: str) -> Any:
        try:
            import pyarrow
        except ImportError:
            rule = f"the file is packed with {kind}, which needs the package pyarrow"
            raise ConfigError(name, rule, "Install it: pip install pyarrow") from None
        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), kind)

    return unpacked


_KINDS: tuple[tuple[bytes, Callable[[Path, str], Any]], ...] = (
    (b"\x1f\x8b", lambda path, _: gzip.GzipFile(path)),
    (b"BZh", lambda path, _: bz2.BZ2File(path)),
    (b"\xfd7zXZ\x00", lambda path, _: lzma.LZMAFile(path)),  # noqa: SIM115
    (b"\x28\xb5\x2f\xfd", _by_arrow("zstd")),
    (b"\x04\x22\x4d\x18", _by_arrow("lz4")),
)
_ZIP = b"PK\x03\x04"
# What unpacking raises where a file is broken, beside OSError.
BROKEN = (EOFError, lzma.LZMAError)


def open_unpacked(path: Path, name: str) -> IO[bytes]:
    """What a file holds, unpacked, from its beginning; it has ``peek``. ``name`` is the file's in messages.

    Raises:
        ConfigError: an archive of several files, or a packing for which a package is absent.
        OSError: it cannot be opened.
    """
    file = path.open("rb", buffering=AHEAD)
    start = file.peek(len(_ZIP))  # type: ignore[attr-defined]
    if start.startswith(_ZIP):
        file.close()
        raise ConfigError(name, "is an archive of several files", f"Unpack it: unzip {name}")
    unpack = next((found for begin, found in _KINDS if start.startswith(begin)), None)
    if unpack is None:
        return file
    file.close()
    return io.BufferedReader(unpack(path, name), AHEAD)
