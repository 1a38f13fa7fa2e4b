"""A split by parts: one dim that holds several things side by side (q|k|v, gate|up), each cut over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.spec.layout import ParamLayout, chunk_range

Ranges = tuple[tuple[int, int], ...]


def part_ranges(parts: Sequence[int], degree: int, rank: int) -> Ranges:
    """What ``rank`` holds of a dim that is ``parts`` side by side: its chunk of each, ascending.

    ``((4, 2), 2, 1) -> ((2, 4), (5, 6))``
    """
    ranges, offset = [], 0
    for size in parts:
        start, stop = chunk_range(size, degree, rank)
        ranges.append((offset + start, offset + stop))
        offset += size
    return merged(ranges) or ((0, 0),)


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """``ranges`` without empty ones, neighbours joined."""
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def intervals(indices: Sequence[int]) -> Ranges:
    """Ascending ``indices`` as half-open ranges: ``[0, 1, 4] -> ((0, 2), (4, 5))``."""
    return merged([(i, i + 1) for i in indices])


def find_parts(held: Sequence[Sequence[int]], size: int) -> tuple[int, ...] | None:
    """The parts by which ``part_ranges`` gives each rank the indices that it needs, None where there are none.

    Args:
        held: for each rank the ascending indices of a dim of ``size`` elements that its share depends on.
    """
    degree = len(held)
    cuts = [intervals(indices) for indices in held]
    if sorted(i for indices in held for i in indices) != list(range(size)):
        return None  # a gap, or an element that two ranks need
    starts = [start for start, _ in cuts[0]]
    parts = tuple(b - a for a, b in zip(starts, [*starts[1:], size], strict=True))
    if starts[:1] != [0] or any(merged(part_ranges(parts, degree, rank)) != cuts[rank] for rank in range(degree)):
        return None
    return parts


def find_units(held: Sequence[Sequence[int]], size: int) -> int | None:
    """The number of equal units of which each rank needs one, fewer units than ranks; None where it is not so."""
    degree = len(held)
    width = len(held[0])
    if not width or size % width or not 1 < size // width < degree or degree % (size // width):
        return None
    units = size // width
    wanted = [list(range(r * units // degree * width, (r * units // degree + 1) * width)) for r in range(degree)]
    return units if [list(indices) for indices in held] == wanted else None


def scaled(parts: Sequence[int], size: int) -> tuple[int, ...] | None:
    """``parts`` of a small copy as those of a dim of ``size``, in the same proportions; None where a rest is left."""
    total = sum(parts)
    if any(part * size % total for part in parts):
        return None
    return tuple(part * size // total for part in parts)


def local_parameter(parameter: nn.Parameter, layout: ParamLayout) -> nn.Parameter:
    """A parameter of the local shape; on meta without values, else with this rank's of ``parameter``."""
    local = torch.empty(layout.local_shape, dtype=parameter.dtype, device=parameter.device)
    if not parameter.is_meta:
        for piece in layout.pieces:
            local[piece.local_slices] = parameter.detach()[piece.whole_slices]
    return nn.Parameter(local, requires_grad=parameter.requires_grad)
