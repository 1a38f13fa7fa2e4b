"""What machine 0 answers at the endpoint while it prepares data, before its store is there. Imports no torch.

Machines that wait for it ask now and then, and wait on for as long as its answers change.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.data.child import Counted
from shardwise.launch.place import Nodes

_WORD = b"shardwise prepares "  # begins an answer; the number of rows follows, and a line break
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 0.3  # a store says nothing of its own accord


@contextmanager
def beacon(nodes: Nodes) -> Iterator[Counted]:
    """Answer at the endpoint of ``nodes`` while the block runs; what it gives is to be told how many rows are done.

    An endpoint that cannot be opened is left to the meeting, which says why.
    """
    rows, last = [0], [0]

    def count(number: int) -> None:
        rows[0] += number - last[0] if number >= last[0] else number  # the next source is counted anew
        last[0] = number

    server = _open(nodes)
    if server is None:
        yield count
        return
    ended = threading.Event()
    thread = threading.Thread(target=_serve, args=(server, rows, ended), daemon=True)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()
        server.close()


def _open(nodes: Nodes) -> socket.socket | None:
    if nodes.count == 1 or nodes.rank or nodes.endpoint is None:
        return None
    place = "", int(nodes.endpoint.rpartition(":")[2])
    # At every address, as the store: the endpoint's own may be that of a gate before this machine.
    for family in (socket.AF_INET6, socket.AF_INET) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
        try:
            server = socket.create_server(place, family=family, dualstack_ipv6=family == socket.AF_INET6)
        except OSError:
            continue
        server.settimeout(_POLL_SECONDS)
        return server
    return None


def _serve(server: socket.socket, rows: list[int], ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            with server.accept()[0] as caller:
                caller.sendall(_WORD + b"%d\n" % rows[0])
                caller.settimeout(_POLL_SECONDS)
                caller.recv(1)  # it closes first, so that the port is free at once
        except OSError:
            continue


def preparing_rows(host: str, port: int, timeout: float) -> int | None:
    """Rows that the machine at an endpoint has prepared; None where it is past that.

    Raises:
        OSError: nobody answers.
    """
    with socket.create_connection((host, port), timeout) as caller:
        caller.settimeout(_ANSWER_SECONDS)
        try:
            answer = caller.recv(64)
        except TimeoutError:
            return None
    text = answer.removeprefix(_WORD).strip()
    return int(text) if answer.startswith(_WORD) and text.isdigit() else None
