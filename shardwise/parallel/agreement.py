"""What one rank finds out for all."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import ShardwiseError

T = TypeVar("T")
_TELL_SECONDS = 60.0  # half an hour is what a collective waits, two minutes the least that is set anywhere
_AT_WORK = "rank 0 is at work"


def on_all_ranks(holds: bool) -> bool:
    """Whether something holds on every rank; the same answer on all of them."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, holds)
    return all(box)


def on_one_machine() -> bool:
    """Whether all ranks run under one host name; the same answer on all of them."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, platform.node())
    return len(set(box)) == 1


def from_rank_0(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank; the other ranks do not call it.

    It may take longer than a collective may wait: meanwhile rank 0 tells the others that it is at work. A thread does
    that, and ``make`` has the main one: a user's data set may hold what another thread may not use (sqlite3, signals).

    Raises:
        ShardwiseError: rank 0's refusal, on every rank.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        made = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            telling = thread.submit(_tell_until, made)
            try:
                box[0] = make()
            except ShardwiseError as error:
                box[0] = error
            finally:
                made.set()
        telling.result()  # of the two threads one alone is in a collective
    dist.broadcast_object_list(box, src=0)
    while box[0] == _AT_WORK:
        dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ShardwiseError):
        raise box[0]
    found: T = box[0]
    return found


def _tell_until(made: threading.Event) -> None:
    while not made.wait(_TELL_SECONDS):
        dist.broadcast_object_list([_AT_WORK], src=0)
