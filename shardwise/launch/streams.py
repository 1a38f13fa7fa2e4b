"""A worker's output: all of it into its log file, rank 0's on the terminal as well."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


class _LossyFile(io.FileIO):
    """A file that takes every write, also when the other end has gone.

    A job must not die because the terminal that watched it was closed.
    """

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


class _Tee(io.TextIOBase):
    """A text stream that writes to a log, and shows a copy on the terminal unless it is ``muted``."""

    def __init__(self, log: TextIO, terminal: TextIO, muted: bool = False) -> None:
        self._log, self._terminal, self.muted = log, terminal, muted

    def write(self, text: str, /) -> int:
        if not self.muted:
            self._terminal.write(text)
        return self._log.write(text)

    def flush(self) -> None:
        self._terminal.flush()
        self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> Any:  # what is written as bytes goes to the log alone
        return self._log.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._log.encoding


def log_path(output_dir: Path, rank: int) -> Path:
    """Where the output of a rank is kept."""
    return output_dir / "logs" / f"rank-{rank}.log"


def _lossy_stream(descriptor: int, encoding: str) -> TextIO:
    raw = _LossyFile(descriptor, "w")
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True)


def redirect(path: Path, terminal: bool, muted: bool = False) -> TextIO | None:
    """Send stdout and stderr of this process, and of libraries below Python, to one file in append mode.

    Appending keeps the two streams from overwriting each other.

    Args:
        path: the log file; its folder exists.
        terminal: whether what Python prints is also shown where it would have gone before.
        muted: show nothing of it before :func:`show` is called.

    Returns:
        A stream to the terminal (what stderr was before) if ``terminal``, else None.
    """
    encoding = sys.stderr.encoding
    copies = [_lossy_stream(os.dup(number), encoding) for number in (1, 2)] if terminal else []
    switch_log(path)
    for stream in (sys.stdout, sys.stderr):
        # Line by line, so that the log is complete up to a crash; UTF-8, whatever the locale says.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    if not copies:
        return None
    sys.stdout, sys.stderr = _Tee(sys.stdout, copies[0], muted), _Tee(sys.stderr, copies[1], muted)
    return copies[1]


def switch_log(path: Path) -> None:
    """Let stdout and stderr of this process go on in another file, in append mode."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, number)
    os.close(log)


def show() -> None:
    """Show on the terminal what is printed from now on, where :func:`redirect` was told to and muted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Tee):
            stream.muted = False
