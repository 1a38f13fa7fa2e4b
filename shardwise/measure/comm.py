"""Times of collectives over groups of every shape that the processes of one machine can form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from shardwise.measure.clock import Clock
from shardwise.measure.samples import CollectiveSample

_SIZES = {"quick": (2**12, 2**18, 2**22), "full": (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)}  # bytes
_OPS = {"quick": ("all_reduce", "all_gather", "reduce_scatter", "send"), "full": ()}
_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def group_sizes(processes: int) -> list[int]:
    """Sizes of groups that share the processes out: divisors above 1."""
    return [size for size in range(2, processes + 1) if processes % size == 0]


def time_collectives(clock: Clock, level: str) -> Iterator[CollectiveSample]:
    """Every collective over every group size; all groups of a size, of neighbouring ranks, are at work at once."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    for size in group_sizes(processes):
        group = _own_group(rank, processes, size)
        for op in _OPS[level] or _ALL:
            for num_bytes in _SIZES[level]:
                seconds = clock.together(_operation(op, num_bytes, size, group, clock.device))
                yield CollectiveSample(op, size, num_bytes, seconds)


def _own_group(rank: int, processes: int, size: int) -> dist.ProcessGroup:
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, processes, size)]
    return groups[rank // size]


def _operation(
    op: str, num_bytes: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """One collective of a tensor of ``num_bytes``, as the formulas of the planner count its size."""
    number = max(size, num_bytes // 4 // size * size)
    whole, part = torch.zeros(number, device=device), torch.zeros(number // size, device=device)
    if op == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    if op == "all_gather":
        return partial(dist.all_gather_single, whole, part, group=group)
    if op == "reduce_scatter":
        return partial(dist.reduce_scatter_single, part, whole, group=group)
    if op == "all_to_all":
        return partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
    return partial(_pass_on, whole, size, group)


def _pass_on(tensor: torch.Tensor, size: int, group: dist.ProcessGroup) -> None:
    """Ranks of the first half of a group send to those of the second half, as pipeline stages do."""
    place, half = dist.get_rank(group), size // 2
    if place < half:
        dist.send(tensor, group=group, group_dst=place + half)
    elif place < 2 * half:
        dist.recv(tensor, group=group, group_src=place - half)
