"""What one rank finds out for all."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
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

    It may take longer than a collective may wait: meanwhile rank 0 tells the others that it is at work.

    Raises:
        ShardwiseError: rank 0's refusal, on every rank.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(make)
            while not wait([made], _TELL_SECONDS).done:
                dist.broadcast_object_list([_AT_WORK], src=0)
        try:
            box[0] = made.result()
        except ShardwiseError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    while box[0] == _AT_WORK:
        dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ShardwiseError):
        raise box[0]
    found: T = box[0]
    return found
