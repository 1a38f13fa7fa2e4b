"""Which part of a parameter a rank holds: the one description that every room reads.

Initialisation draws by it, loading reads by it, the gradient norm counts by it, checkpoints and
exports write by it. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def chunk_range(size: int, parts: int, index: int) -> Range:
    """The range of part ``index`` when ``size`` elements are cut as :func:`torch.chunk` cuts them.

    All parts hold ``ceil(size / parts)`` elements, but the last ones, which may hold fewer or none.
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True)
class Piece:
    """A box of a parameter: its half-open range of each dim in the ``whole`` parameter and in the ``local`` tensor."""

    whole: Ranges
    local: Ranges

    @property
    def whole_slices(self) -> tuple[slice, ...]:
        """``whole`` as an index of the whole parameter."""
        return tuple(slice(*span) for span in self.whole)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """``local`` as an index of the local tensor."""
        return tuple(slice(*span) for span in self.local)


@dataclass(frozen=True)
class ParamLayout:
    """The part of one parameter on one rank.

    The tensor axis takes ranges of dim ``tp_dim`` first and lays them end to end (of query, key and value rows in
    one matrix, a range of each); the ``dp_shard`` axis then cuts dim 0 of what that gives.

    Args:
        name: module parameter name, without any wrapper's prefix.
        shape: shape of the whole parameter.
        tp_dim: the dim that the tensor axis cuts, None where each tensor rank holds all of it.
        tp_ranges: this rank's ranges of ``tp_dim``, ascending and disjoint, in the order of the local tensor;
            empty where ``tp_dim`` is None.
        shard_range: this rank's range of dim 0 of the tensor-local part, None without dp_shard.
        owned: exactly one rank owns each element; only owned elements are counted in norms and saved.
        tp_partial: replicated over the tensor axis, but each rank's gradient is only its share.
        tied_to: set on the second copy of a tied weight; the name of its owner.
        has_copy: set on a tied weight whose second copy is on another stage.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_ranges: Ranges = ()
    shard_range: Range | None = None
    owned: bool = True
    tp_partial: bool = False
    tied_to: str | None = None
    has_copy: bool = False

    def __post_init__(self) -> None:
        bounds = [bound for span in self.tp_ranges for bound in span]
        size = 0 if self.tp_dim is None else self.shape[self.tp_dim]
        assert (self.tp_dim is None) == (not self.tp_ranges), (self.name, self.tp_dim, self.tp_ranges)
        assert [0, *bounds, size] == sorted([0, *bounds, size]), (self.name, self.shape, self.tp_ranges)

    @property
    def source(self) -> str:
        """The name under which the value is known in files and checkpoints."""
        return self.tied_to or self.name

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank holds, as few boxes as can be; their ``local`` ranges tile the local tensor in order."""
        runs = [_runs(self._held(dim), self._window(dim)) for dim in range(len(self.shape))]
        return tuple(
            Piece(tuple(whole for whole, _ in dims), tuple(local for _, local in dims))
            for dims in itertools.product(*runs)
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in map(self._window, range(len(self.shape))))

    def _held(self, dim: int) -> Ranges:
        """The ranges of a dim that the tensor axis leaves to this rank."""
        return self.tp_ranges if dim == self.tp_dim else ((0, self.shape[dim]),)

    def _window(self, dim: int) -> Range:
        """What the data axis leaves of these ranges, laid end to end."""
        if dim == 0 and self.shard_range is not None:
            return self.shard_range
        return 0, sum(stop - start for start, stop in self._held(dim))


def _runs(ranges: Ranges, window: Range) -> list[tuple[Range, Range]]:
    """``ranges`` laid end to end and cut to ``window``: what is left of each, and its place in the window."""
    runs = []
    place = -window[0]  # of the next range's start in the window
    for start, stop in _union(ranges):
        low, high = max(start, start - place), min(stop, start - place + window[1] - window[0])
        if low < high:
            runs.append(((low, high), (low - start + place, high - start + place)))
        place += stop - start
    return runs


def _union(ranges: Iterable[Range]) -> Ranges:
    """As few ranges as hold the same elements, ascending: those that touch are one, and empty ones are none."""
    union: list[Range] = []
    for start, stop in sorted(span for span in ranges if span[0] < span[1]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return tuple(union)


def covers(layouts: Sequence[ParamLayout]) -> bool:
    """Whether the owned pieces of one parameter, over all ranks, hold every element exactly once."""
    if not layouts:
        return False
    boxes = [piece.whole for layout in layouts if layout.owned for piece in layout.pieces]
    disjoint = not any(_overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    return disjoint and sum(map(_size, boxes)) == math.prod(layouts[0].shape)


def _overlap(a: Ranges, b: Ranges) -> bool:
    return all(low < stop and start < high for (low, high), (start, stop) in zip(a, b, strict=True))


def _size(box: Iterable[Range]) -> int:
    return math.prod(stop - start for start, stop in box)
