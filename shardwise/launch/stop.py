"""The stop channel: a signal to the launcher becomes a request that the workers read at a step boundary."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

from shardwise.launch.culprit import WorkerError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PREFIX, _KEY = "shardwise", "stop"
_LAST_WORDS_SECONDS = 5.0


class StopListener:
    """Takes SIGTERM and SIGINT while its block runs, and only notes them; SIGHUP it survives.

    A terminal that is closed sends SIGHUP. The job goes on without it, into its logs, as if nohup had started it.

    Attributes:
        signal_name: the first signal, None before it.
        at_once: a SIGINT came after the first signal: the user does not want to wait.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.at_once = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopListener:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._leave_terminal)
        self._terminals = [descriptor for descriptor in (0, 1, 2) if _is_terminal(descriptor)]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT:
            self.at_once = True

    def _leave_terminal(self, _number: int, _frame: FrameType | None) -> None:
        """Let what goes to a terminal that is gone go nowhere: writing there is an error from now on."""
        for descriptor in self._terminals:
            if not _is_terminal(descriptor):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def seconds_since(self) -> float:
        """Seconds since the first signal, 0 before it."""
        return 0.0 if self.signal_name is None else time.monotonic() - self._since


def _is_terminal(descriptor: int) -> bool:
    """Whether a terminal is there now; of one that was closed the system knows no more."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


class _Channel:
    """The job's store; the same class on both ends, connected at the first use.

    A connection of its own, so that asking never waits behind another thread's blocking read.

    Args:
        seconds: how long to try to reach the store, and to wait for an answer.
    """

    def __init__(self, host: str, port: int, seconds: float = 300.0) -> None:
        self._address, self._limit = (host, port), timedelta(seconds=seconds)
        self._store: Any = None

    def _connected(self) -> Any:
        if self._store is None:
            from torch.distributed import PrefixStore, TCPStore

            host, port = self._address
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._limit)
            self._store = PrefixStore(_PREFIX, store)
        return self._store


class StopChannel(_Channel):
    """The request to stop."""

    def request(self, signal_name: str) -> None:
        """Ask the workers to stop, because the launcher received this signal."""
        self._connected().set(_KEY, signal_name)

    def requested(self) -> str | None:
        """The signal that asked for the stop, or None."""
        store = self._connected()
        return store.get(_KEY).decode() if store.check([_KEY]) else None


class ErrorChannel(_Channel):
    """Errors of ranks that could not leave them on the disk.

    The store may be gone with the machine that holds it: it is not looked for long, since what follows is the end.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, seconds=_LAST_WORDS_SECONDS)

    def leave(self, error: WorkerError) -> None:
        """Leave it for the launcher."""
        self._connected().set(f"error/{error.rank}", json.dumps(asdict(error)))

    def left(self, num_ranks: int) -> list[WorkerError]:
        """What the ranks have left."""
        store = self._connected()
        keys = [key for key in (f"error/{rank}" for rank in range(num_ranks)) if store.check([key])]
        return [WorkerError(**json.loads(store.get(key))) for key in keys]
