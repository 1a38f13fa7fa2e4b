"""The fork server: a process with torch and transformers loaded, from which workers are forked.

It is started before the launcher imports torch itself, so that both imports run at the same time.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

PRELOAD = "shardwise.launch.preload"
LAUNCHER_PID = "SHARDWISE_LAUNCHER_PID"  # environment variable of the fork server and its workers
PRELOAD_MORE = "SHARDWISE_PRELOAD"  # environment variable: further modules that this job needs, with commas between
# A socket's path has at most 107 bytes, and multiprocessing adds /pymp-12345678/listener-12345678 to the folder's.
_LONGEST_FOLDER, _SHORT_FOLDER = 107 - 33, "/tmp"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs, for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def neutral_main() -> Iterator[None]:
    """Hide ``__main__`` while the block runs.

    Multiprocessing runs the parent's ``__main__`` again in every child. The children of a command need nothing of
    it, and a script without a guard would train again in each.
    """
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _short_folder() -> None:
    """Let multiprocessing put its sockets where their paths are short enough, also with a long ``TMPDIR``."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER or not os.access(_SHORT_FOLDER, os.W_OK):
        return
    before, tempfile.tempdir = tempfile.tempdir, _SHORT_FOLDER
    try:
        util.get_temp_dir()  # makes a folder once, remembers it, and removes it at the end of this process
    finally:
        tempfile.tempdir = before


def start() -> None:
    """Start the fork server and return while it still imports. To be called on the main thread: the kernel takes
    the end of the thread that started a process for the end of its parent."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    assert server._forkserver_pid is None, "a fork server with other modules runs already"
    search_path = os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    # PYTHONSAFEPATH: without it a torch.py or json.py in the current folder would be imported.
    values = {LAUNCHER_PID: str(os.getpid()), "PYTHONPATH": search_path, "PYTHONSAFEPATH": "1"}
    server.set_forkserver_preload([PRELOAD])
    _short_folder()
    with environment(values), neutral_main():
        server.ensure_running()


def stop() -> None:
    """End the fork server, and with it every worker that is left."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


@contextmanager
def running() -> Iterator[None]:
    """A fork server for as long as the block runs."""
    start()
    try:
        with neutral_main():
            yield
    finally:
        stop()
