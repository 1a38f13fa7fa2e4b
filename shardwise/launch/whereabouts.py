"""What a rank is at, for a message about one that hangs. Imports no torch.

A worker keeps a few words at the head of a file of its own. Asked by a signal, the interpreter's fault handler writes
the stack of every thread behind them, also where the worker is inside a call that never returns.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR2
_HEAD_BYTES = 64
_ANSWER_SECONDS = 3.0  # on a busy machine; most answer in a hundredth of it
_LOOK_SECONDS = 0.05
_SHOWN_FRAMES = 4
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
# Files of torch whose public functions are collectives, or wait for one.
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py")
# Python functions that wait for a collective that was begun before; the wait itself leaves no frame behind them.
_WAITS = {
    ("buckets.py", "finish"): "all_reduce",
    ("replicate.py", "_sum_in_buckets"): "all_reduce",
    ("schedules.py", "_wait_batch_p2p"): "batch_isend_irecv",
    ("_fsdp_collectives.py", "foreach_all_gather_copy_out"): "all_gather",
}
_WRAPPERS = ("c10d_logger.py", "_contextlib.py", *_COLLECTIVE_FILES)


class Whereabouts:
    """A worker's side. The fault handler needs the file for as long as the process lives."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._descriptor = os.open(where_path(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        faulthandler.register(SIGNAL, file=self._descriptor, all_threads=True)
        os.write(self._descriptor, b" " * (_HEAD_BYTES - 1) + b"\n")  # stacks go behind it
        self.note("its start")

    def note(self, text: str) -> None:
        """Keep these words. They go nowhere where the disk takes nothing more."""
        with suppress(OSError):
            os.pwrite(self._descriptor, text.encode()[: _HEAD_BYTES - 1].ljust(_HEAD_BYTES - 1), 0)


@dataclass(frozen=True)
class Stack:
    """Where a rank stands.

    Attributes:
        at: its own words, such as ``step 7``.
        frames: ``function (file:line)`` of its main thread, the innermost first; none if it gave no answer.
        collective: the operation of torch that it waits in, None if in none.
        text: the whole answer, of all threads.
    """

    at: str
    frames: tuple[str, ...]
    collective: str | None
    text: str

    def __str__(self) -> str:
        if not self.frames:
            return f"in {self.at}, and gives no answer (it is stopped, or inside the system)"
        where = f"in {self.collective}" if self.collective else "outside of any collective"
        return f"in {self.at}, {where}: {' < '.join(self.frames[:_SHOWN_FRAMES])}"


def where_path(folder: Path, rank: int) -> Path:
    """Where a rank's words and stacks are."""
    return folder / "logs" / f".where-rank-{rank}"


def ask(folder: Path, processes: Mapping[int, int]) -> dict[int, Stack]:
    """The stacks of workers.

    Args:
        processes: process id by rank. One that keeps no words yet is left alone: the signal would end it.
    """
    asked = {rank: pid for rank, pid in processes.items() if _head(where_path(folder, rank))}
    sizes = {rank: _size(folder, rank) for rank in asked}
    for pid in asked.values():
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    deadline, seen = time.monotonic() + _ANSWER_SECONDS, sizes
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        before, seen = seen, {rank: _size(folder, rank) for rank in asked}
        if seen == before and all(seen[rank] != size for rank, size in sizes.items()):
            break  # all have answered, and none is still writing
    return {rank: _read(where_path(folder, rank), size) for rank, size in sizes.items()}


def forget(folder: Path, ranks: Iterable[int]) -> None:
    """Remove the files of workers that are gone."""
    for rank in ranks:
        with suppress(OSError):
            where_path(folder, rank).unlink()


def parse_stack(at: str, text: str) -> Stack:
    """The answer of the fault handler; of several threads the main one comes last."""
    threads = [part for part in re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE) if "File" in part]
    matches = [match for match in map(_FRAME.match, threads[-1].splitlines()) if match] if threads else []
    files = [(Path(match[1]).name, match[3]) for match in matches]
    collective = next((name for file, name in files if file in _COLLECTIVE_FILES and name[0] != "_"), None)
    if collective is None and files:
        collective = _WAITS.get(files[0])
    shown = [match for match, (file, _) in zip(matches, files, strict=True) if file not in _WRAPPERS]
    frames = tuple(f"{match[3]} ({Path(match[1]).name}:{match[2]})" for match in shown)
    return Stack(at, frames, collective, text.strip())


def _size(folder: Path, rank: int) -> int:
    try:
        return where_path(folder, rank).stat().st_size
    except OSError:
        return 0


def _head(path: Path) -> str:
    return _content(path)[:_HEAD_BYTES].decode("utf-8", "replace").strip()


def _read(path: Path, start: int) -> Stack:
    return parse_stack(_head(path), _content(path)[start:].decode("utf-8", "replace"))


def _content(path: Path) -> bytes:
    """What a file holds; nothing where it has gone or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def suspects(stacks: Mapping[int, Stack]) -> list[int]:
    """The ranks that others may have waited for: those in no collective."""
    return [rank for rank, stack in sorted(stacks.items()) if stack.collective is None]
