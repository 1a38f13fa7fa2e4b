"""A split by parts: one dim that holds several things side by side (q|k|v, gate|up), each cut over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardwise.spec.layout import ParamLayout, Range, Ranges, chunk_range


class Part(NamedTuple):
    """``size`` elements of a dim, of which each rank holds a chunk; or ``units`` equal ones, fewer than ranks.

    Then neighbouring ranks hold the same one (a key head, where there are more ranks than such heads).
    """

    size: int
    units: int = 0

    def range_of(self, degree: int, rank: int) -> Range:
        """What ``rank`` holds of this part, counted from its start."""
        if not self.units:
            return chunk_range(self.size, degree, rank)
        width, unit = self.size // self.units, rank * self.units // degree
        return unit * width, (unit + 1) * width


Parts = tuple[Part, ...]


def part_ranges(parts: Sequence[Part], degree: int, rank: int) -> Ranges:
    """What ``rank`` holds of a dim that is ``parts`` side by side, ascending.

    ``((4,), (2,)), 2, 1 -> ((2, 4), (5, 6))``
    """
    ranges, offset = [], 0
    for part in parts:
        start, stop = part.range_of(degree, rank)
        ranges.append((offset + start, offset + stop))
        offset += part.size
    return merged(ranges) or ((0, 0),)


def merged(ranges: Sequence[Range]) -> Ranges:
    """``ranges`` without empty ones, neighbours joined."""
    out: list[Range] = []
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


def find_parts(held: Sequence[Sequence[int]], size: int) -> Parts | None:
    """The parts by which :func:`part_ranges` gives each rank the indices that it needs, None where there are none.

    Args:
        held: for each rank the ascending indices of a dim of ``size`` elements that its share depends on.
    """
    degree = len(held)
    if degree < 2 or {i for indices in held for i in indices} != set(range(size)):
        return None  # an element that no rank needs
    if all(len(indices) == size for indices in held):
        return None  # every rank needs all
    cuts = [intervals(indices) for indices in held]
    # What is one interval on this rank may be two parts that touch: it is cut where any rank begins or ends.
    bounds = sorted({bound for own in cuts for span in own for bound in span})
    atoms = [_cut_at(own, bounds) for own in cuts]
    if len({len(own) for own in atoms}) != 1:
        return None
    parts = []
    for spans in zip(*atoms, strict=True):
        distinct = sorted(set(spans))
        units = len(distinct) if len(distinct) < degree else 0
        parts.append(Part(distinct[-1][1] - distinct[0][0], units))
    found = tuple(parts)
    if sum(part.size for part in found) != size or any(part.units and part.size % part.units for part in found):
        return None
    return found if all(merged(part_ranges(found, degree, rank)) == cuts[rank] for rank in range(degree)) else None


def _cut_at(ranges: Ranges, bounds: Sequence[int]) -> list[Range]:
    """``ranges`` cut at those of ``bounds`` that lie inside of them."""
    out = []
    for start, stop in ranges:
        inner = [start, *(bound for bound in bounds if start < bound < stop), stop]
        out += list(itertools.pairwise(inner))
    return out


def scaled(parts: Sequence[Part], size: int) -> Parts | None:
    """``parts`` of a small copy as those of a dim of ``size``, in the same proportions; None where a rest is left."""
    total = sum(part.size for part in parts)
    if any(part.size * size % total for part in parts):
        return None
    return tuple(part._replace(size=part.size * size // total) for part in parts)


def local_parameter(parameter: nn.Parameter, layout: ParamLayout) -> nn.Parameter:
    """A parameter of the local shape; on meta without values, else with this rank's of ``parameter``."""
    local = torch.empty(layout.local_shape, dtype=parameter.dtype, device=parameter.device)
    if not parameter.is_meta:
        for piece in layout.pieces:
            local[piece.local_slices] = parameter.detach()[piece.whole_slices]
    return nn.Parameter(local, requires_grad=parameter.requires_grad)
