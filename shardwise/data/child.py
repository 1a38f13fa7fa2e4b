"""``python -m shardwise.data.child``: tokenise a source ahead, in a process that may fork others.

The launcher loads no tokenizer, and rank 0 has threads that do not survive a fork; both ask this child. The request is
one JSON object on stdin. On stdout there is one object a line: ``{"rows": n}`` now and then, and at last the answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import shardwise.errors
from shardwise.data.prepared import Progress as Told
from shardwise.data.prepared import find_prepared, prepare, size_of
from shardwise.data.rows import Source
from shardwise.data.tally import Notify
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.lifeline import die_with_parent
from shardwise.spec.run import RunConfig

SMALL_BYTES = 8 << 20  # of files that rank 0 reads in about the time that a child needs to start
_STOPPED = 130
_REFRESH_SECONDS = 0.1
_TOLD_SECONDS = 1.0  # between two words to the process that waits
_LEAVE_SECONDS = 10.0  # that the child has to end its own processes in
Counted = Callable[[int], None]  # (rows so far)


def ready(
    source: Source, cache: Path | None, processes: int, notify: Notify, counted: Counted | None = None
) -> Path | None:
    """The folder with the tokens of a source, tokenised now in a child if they are not there.

    None where that is not worth it: the source is small, or there is no cache that can be written to (``notify`` is
    told); rank 0 then tokenises it and hands the rows to all. ``counted`` is told, every second, of rows that are done.

    Raises:
        ShardwiseError: what the child refuses; :class:`LaunchError` if it died.
    """
    if cache is None:
        return None
    found = find_prepared(source, cache)
    if found is not None or size_of(source) <= SMALL_BYTES:
        return found
    request = {
        "run": source.run.model_dump(mode="json", by_alias=True),
        "path": source.name,
        "sizes": [source.vocab_size, source.max_positions, source.max_samples],
        "cache": str(cache),
        "processes": processes,
        "parent": os.getpid(),
    }
    answer = _ask(request, source.name, counted)
    if "refused" in answer:
        kind: type[ShardwiseError] = getattr(shardwise.errors, answer["refused"].pop("kind"))
        raise kind(**answer["refused"])
    if "unwritten" in answer:
        notify(f"{source.name}: tokens are not kept, since {cache} cannot be written to ({answer['unwritten']})")
        return None
    return Path(answer["folder"])


def _ask(request: dict[str, Any], name: str, counted: Counted | None) -> dict[str, Any]:
    """What the child answers; it does not outlive this call, however that ends."""
    command = [sys.executable, "-m", "shardwise.data.child"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    answer: dict[str, Any] | None = None
    try:
        with suppress(BrokenPipeError):  # its status says more
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
        for line in child.stdout:
            found = json.loads(line)
            if "rows" not in found:
                answer = found
            elif counted is not None:
                counted(found["rows"])
        child.wait()
    except ValueError:
        answer = None  # it was killed in the middle of a line
    finally:
        _end(child)
    if child.returncode == _STOPPED:
        raise KeyboardInterrupt
    if answer is None:
        rule = f"ended with status {child.returncode} while it tokenised {name}"
        raise LaunchError(" ".join(command[1:]), rule, "Run shardwise data prepare by itself to see why")
    return answer


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a child that is still there, and give it time to end its own processes; they die with it anyway."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_LEAVE_SECONDS)
        except BaseException:  # also a second Ctrl-C: it has had its time
            child.kill()
            child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def prepare_shown(
    source: Source, cache: Path, processes: int, console: Console, counted: Counted | None = None
) -> Path:
    """:func:`shardwise.data.prepared.prepare` with a progress bar on a terminal, and lines elsewhere.

    ``counted`` is told of every chunk how many rows are done.

    Raises:
        ShardwiseError, OSError: as that function.
    """
    if not console.is_terminal:
        told = [0]

        def tell(rows: int, share: float | None) -> None:
            if counted is not None:
                counted(rows)
            if rows >= 10 * told[0] or rows - told[0] >= 100_000:
                told[0] = rows
                console.print(f"{source.name}: {rows} rows tokenised", markup=False, highlight=False, soft_wrap=True)

        return prepare(source, cache, processes, tell)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # Without its thread: a fork beside one may copy a lock that it holds.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("tokenising", total=None)
        shown = [0.0]

        def show(rows: int, share: float | None) -> None:
            if counted is not None:
                counted(rows)
            now = time.monotonic()
            is_due = now - shown[0] >= _REFRESH_SECONDS
            shown[0] = now if is_due else shown[0]
            total, text = None if share is None else 1.0, f"tokenised {rows} rows"
            bar.update(task, total=total, completed=share or 0.0, description=text, refresh=is_due)

        advance: Told = show
        return prepare(source, cache, processes, advance)


class _Told:
    """Says now and then how many rows are done."""

    _last = 0.0

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers

    def __call__(self, rows: int) -> None:
        if time.monotonic() - self._last >= _TOLD_SECONDS:
            self._last = time.monotonic()
            print(json.dumps({"rows": rows}), file=self._answers, flush=True)


def _interrupt(_signal: int, _frame: Any) -> None:
    """Leave at the first Ctrl-C, and do not hear of others while the pool is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """Answer the request on stdin; the exit status."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a rank's child leaves Ctrl-C to the launcher
        signal.signal(signal.SIGINT, _interrupt)
    request = json.load(sys.stdin)
    die_with_parent(request["parent"])
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # a tokenizer of foreign code may print: that is no answer
        answer = _answered(request, answers)
    if answer is None:
        return _STOPPED
    print(json.dumps(answer), file=answers)
    return 0


def _answered(request: dict[str, Any], answers: IO[str]) -> dict[str, Any] | None:
    """What a request comes to; None where Ctrl-C ended it."""
    source = Source(Path(request["path"]), RunConfig.model_validate(request["run"]), *request["sizes"])
    try:
        folder = prepare_shown(
            source, Path(request["cache"]), request["processes"], Console(stderr=True), _Told(answers)
        )
    except ShardwiseError as error:
        refused = {"kind": type(error).__name__, "value": error.value, "rule": error.rule, "remedy": error.remedy}
        return {"refused": refused}
    except OSError as error:
        return {"unwritten": error.strerror or str(error)}
    except KeyboardInterrupt:
        return None
    return {"folder": str(folder)}


if __name__ == "__main__":
    sys.exit(main())
