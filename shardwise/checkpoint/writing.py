"""The files that a rank writes of a checkpoint: summed up as they are written, and slowly beside training."""

from __future__ import annotations

import io
import math
import os
import threading
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

_SHARE = 0.03  # of the cores that are a rank's, which its save takes from its steps
_PIECE_BYTES = 2**20  # between two rests


class Pace:
    """How fast a thread writes beside steps: it rests after each piece in proportion to the work that the piece was.

    Where cores are few, a save takes what it computes from the steps, whenever that is; spread over many steps it takes
    little of each. A save that is waited for rests no more.

    Args:
        num_bytes: that will be written, about.
        num_cores: that are this rank's.
        within: seconds from now in which all is to be written, though more than the share be taken from the steps.
    """

    def __init__(self, num_bytes: int, num_cores: int, within: float = math.inf) -> None:
        self._left, self._share, self._until = num_bytes, _SHARE * num_cores, time.monotonic() + within
        self._hurried = threading.Event()
        self._began = self._had_worked = 0.0

    def begin(self) -> None:
        """A piece begins now; to be called by the thread that writes."""
        self._began, self._had_worked = time.monotonic(), time.thread_time()

    def rest(self, num_bytes: int) -> None:
        """A piece of ``num_bytes`` has been written; on return the next one begins."""
        now, worked = time.monotonic(), time.thread_time() - self._had_worked
        due = (self._until - now) * num_bytes / max(self._left, num_bytes)
        seconds = min(worked / self._share, due) - (now - self._began)
        if seconds > 0:
            self._hurried.wait(seconds)
        self._left -= num_bytes
        self.begin()

    def hurry(self) -> None:
        """Let the thread rest no more, from this moment on."""
        self._hurried.set()


class SummedFiles(FileSystem):
    """DCP's way to files, which keeps the checksum of each: what was handed over is not read again for it.

    Attributes:
        checksums: CRC-32 of the content, by the name of the file; of one that has been closed.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A file that is written from its begin to its end."""
        assert mode == "wb", "checkpoints are read in another way"
        with _SummedFile(io.FileIO(path, mode), self._pace) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.checksum


class _SummedFile(io.BufferedWriter):
    """A file with the checksum of what was written to it."""

    def __init__(self, raw: io.FileIO, pace: Pace | None) -> None:
        super().__init__(raw)
        self._pace = pace
        self.checksum = 0

    def write(self, data: Any, /) -> int:
        """All of ``data``, a piece at a time."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            super().write(piece)
            self.checksum = zlib.crc32(piece, self.checksum)
            if self._pace is not None:
                self._pace.rest(len(piece))
        return len(view)
