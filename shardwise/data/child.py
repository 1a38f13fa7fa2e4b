"""``python -m shardwise.data.child``: tokenise a source ahead, in a process that may fork others.

The launcher loads no tokenizer, and rank 0 has threads that do not survive a fork; both ask this child. The request is
one JSON object on stdin, a refusal one on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import shardwise.errors
from shardwise.data.prepared import Progress as Told
from shardwise.data.prepared import find_prepared, prepare, size_of
from shardwise.data.rows import Source
from shardwise.data.tally import Notify
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.spec.run import RunConfig

SMALL_BYTES = 8 << 20  # of files that rank 0 reads in about the time that a child needs to start
_STOPPED = 130
_REFRESH_SECONDS = 0.1


def ready(source: Source, cache: Path | None, processes: int, notify: Notify) -> Path | None:
    """The folder with the tokens of a source, tokenised now in a child if they are not there.

    None where that is not worth it: the source is small, or there is no cache that can be written to (``notify`` is
    told); rank 0 then tokenises it and hands the rows to all.

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
    }
    command = [sys.executable, "-m", "shardwise.data.child"]
    done = subprocess.run(command, input=json.dumps(request).encode(), stdout=subprocess.PIPE, check=False)
    if done.returncode == _STOPPED:
        raise KeyboardInterrupt
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        rule = f"ended with status {done.returncode} while it tokenised {source.name}"
        raise LaunchError(" ".join(command[1:]), rule, "Run shardwise data prepare by itself to see why") from None
    if "refused" in answer:
        kind: type[ShardwiseError] = getattr(shardwise.errors, answer["refused"].pop("kind"))
        raise kind(**answer["refused"])
    if "unwritten" in answer:
        notify(f"{source.name}: tokens are not kept, since {cache} cannot be written to ({answer['unwritten']})")
        return None
    return Path(answer["folder"])


def prepare_shown(source: Source, cache: Path, processes: int, console: Console) -> Path:
    """:func:`shardwise.data.prepared.prepare` with a progress bar on a terminal, and lines elsewhere.

    Raises:
        ShardwiseError, OSError: as that function.
    """
    if not console.is_terminal:
        told = [0]

        def tell(rows: int, share: float | None) -> None:
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
            now = time.monotonic()
            is_due = now - shown[0] >= _REFRESH_SECONDS
            shown[0] = now if is_due else shown[0]
            total, text = None if share is None else 1.0, f"tokenised {rows} rows"
            bar.update(task, total=total, completed=share or 0.0, description=text, refresh=is_due)

        advance: Told = show
        return prepare(source, cache, processes, advance)


def main() -> int:
    """Answer the request on stdin; the exit status."""
    request = json.load(sys.stdin)
    source = Source(Path(request["path"]), RunConfig.model_validate(request["run"]), *request["sizes"])
    try:
        folder = prepare_shown(source, Path(request["cache"]), request["processes"], Console(stderr=True))
        answer: dict[str, Any] = {"folder": str(folder)}
    except ShardwiseError as error:
        refused = {"kind": type(error).__name__, "value": error.value, "rule": error.rule, "remedy": error.remedy}
        answer = {"refused": refused}
    except OSError as error:
        answer = {"unwritten": error.strerror or str(error)}
    except KeyboardInterrupt:
        return _STOPPED
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
