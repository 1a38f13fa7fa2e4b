"""What one rank finds out for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import ShardwiseError

T = TypeVar("T")


def on_all_ranks(holds: bool) -> bool:
    """Whether something holds on every rank; the same answer on all of them."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, holds)
    return all(box)


def from_rank_0(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank; the other ranks do not call it.

    Raises:
        ShardwiseError: rank 0's refusal, on every rank.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except ShardwiseError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ShardwiseError):
        raise box[0]
    found: T = box[0]
    return found
