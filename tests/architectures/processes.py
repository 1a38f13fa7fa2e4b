"""Each architecture in a forked process of its own with a time limit, so that none ends the list."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any


def in_processes(
    work: Callable[[str], Any], names: Sequence[str], workers: int, limit: float
) -> Iterator[tuple[str, Any, str]]:
    """Name, what ``work`` returned for it (None where it did not), and why not, as they come.

    What this process has imported, the others have too; nothing may have run in it yet.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(work, name, sender))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in wait(list(running), timeout=1.0):
            name, process, _ = running.pop(receiver)
            try:
                yield name, *receiver.recv()
            except EOFError:
                process.join(timeout=10)
                yield name, None, f"its process ended with {process.exitcode}"
            process.join(timeout=10)
        for receiver, (name, process, start) in list(running.items()):
            if time.monotonic() - start > limit:
                del running[receiver]
                process.kill()
                process.join()
                yield name, None, f"took more than {limit:.0f} s"


def _send(work: Callable[[str], Any], name: str, sender: Connection) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    try:
        sender.send((work(name), ""))
    except Exception as error:
        sender.send((None, " ".join(f"{type(error).__name__}: {error}".split())))
    sender.close()
