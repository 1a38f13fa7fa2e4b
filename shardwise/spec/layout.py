"""Which part of a parameter a rank holds: the one description that every room reads.

Initialisation draws by it, loading reads by it, the gradient norm counts by it, checkpoints and
exports write by it. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    """A box of a parameter: its half-open range of each dim in the ``whole`` parameter and in the ``local`` tensor.

    ``owned``: this rank counts it in norms and saves it. Of the ranks that hold an element exactly one owns it.
    """

    whole: Ranges
    local: Ranges
    owned: bool = True

    @property
    def num_elements(self) -> int:
        return _size(self.local)

    def place(self, box: Ranges) -> tuple[slice, ...]:
        """``box``, a part of ``whole``, as an index of the local tensor."""
        shifts = [local - whole for (whole, _), (local, _) in zip(self.whole, self.local, strict=True)]
        return tuple(slice(low + shift, high + shift) for (low, high), shift in zip(box, shifts, strict=True))

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
        tp_shared: ranges of ``tp_dim`` that several tensor ranks hold (the rows of a key head, where there are more
            ranks than such heads); the same on every tensor rank.
        tp_foreign: the ranges of ``tp_dim`` that another tensor rank owns, of those held here.
        owned: this rank owns what it holds, but for ``tp_foreign``. Exactly one rank owns each element; only owned
            elements are counted in norms and saved.
        tp_partial: each rank's gradient is only its share of what several tensor ranks hold: of ``tp_shared``, or
            of all of it where ``tp_dim`` is None.
        tied_to: set on the second copy of a tied weight; the name of its owner.
        has_copy: set on a tied weight whose second copy is on another stage.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_ranges: Ranges = ()
    tp_shared: Ranges = ()
    tp_foreign: Ranges = ()
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
        if self.tp_dim is None and self.shard_range is None and all(self.shape):
            every = tuple((0, size) for size in self.shape)
            return (Piece(every, every, self.owned),)
        runs = [_runs(self._held(dim), self._foreign(dim), self._window(dim)) for dim in range(len(self.shape))]
        return tuple(
            Piece(tuple(r.whole for r in dims), tuple(r.local for r in dims), self.owned and all(r.owned for r in dims))
            for dims in itertools.product(*runs)
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in map(self._window, range(len(self.shape))))

    def _held(self, dim: int) -> Ranges:
        """The ranges of a dim that the tensor axis leaves to this rank."""
        return self.tp_ranges if dim == self.tp_dim else ((0, self.shape[dim]),)

    def _foreign(self, dim: int) -> Ranges:
        """The ranges of a dim that another tensor rank owns."""
        return self.tp_foreign if dim == self.tp_dim else ()

    def _window(self, dim: int) -> Range:
        """What the data axis leaves of these ranges, laid end to end."""
        if dim == 0 and self.shard_range is not None:
            return self.shard_range
        return 0, sum(stop - start for start, stop in self._held(dim))


def over_tensor_ranks(layout: ParamLayout, dim: int, ranges: Sequence[Ranges], rank: int) -> ParamLayout:
    """``layout``, so far whole on the tensor axis, as tensor rank ``rank`` holds it.

    What several ranks hold is owned by the first of them, and each has its share of the gradient.

    Args:
        ranges: of ``dim``, for each tensor rank; together they hold all of it.
    """
    held: Ranges = ()  # by the ranks so far
    again: list[Ranges] = []  # of each rank, what an earlier one holds too
    for own in ranges:
        again.append(_union(_common(own, held)))
        held = _union((*held, *own))
    assert held == ((0, layout.shape[dim]),), (layout.name, layout.shape, ranges)
    shared = _union(itertools.chain(*again))
    return replace(
        layout, tp_dim=dim, tp_ranges=ranges[rank], tp_shared=shared, tp_foreign=again[rank], tp_partial=bool(shared)
    )


def overlaps(a: ParamLayout, b: ParamLayout) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes that two layouts of one parameter both hold, as indices of the local tensor of each."""
    found = []
    for one, other in itertools.product(a.pieces, b.pieces):
        both = intersection(one.whole, other.whole)
        if both is not None:
            found.append((one.place(both), other.place(both)))
    return found


def intersection(a: Ranges, b: Ranges) -> Ranges | None:
    """The box that two boxes have in common, None where there is none."""
    both = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(a, b, strict=True))
    return both if all(low < high for low, high in both) else None


@dataclass(frozen=True)
class _Run:
    """A range of one dim of the whole, and its place in the local tensor."""

    whole: Range
    local: Range
    owned: bool


def _runs(ranges: Ranges, foreign: Ranges, window: Range) -> list[_Run]:
    """``ranges`` laid end to end, parted where the owner changes and cut to ``window``."""
    held = _union(ranges)
    parted = [(span, True) for span in _without(held, foreign)] + [(span, False) for span in _common(held, foreign)]
    runs = []
    place = -window[0]  # of the next range's start in the window
    for (start, stop), owned in sorted(parted):
        low, high = max(start, start - place), min(stop, start - place + window[1] - window[0])
        if low < high:
            runs.append(_Run((low, high), (low - start + place, high - start + place), owned))
        place += stop - start
    return runs


def _common(a: Ranges, b: Ranges) -> Ranges:
    """What two sets of ranges have in common."""
    both = ((max(low, start), min(high, stop)) for low, high in a for start, stop in b)
    return tuple((low, high) for low, high in both if low < high)


def _without(ranges: Ranges, removed: Ranges) -> Ranges:
    """What is left of ``ranges`` without ``removed``, both ascending and disjoint."""
    bounds = [0, *(bound for span in removed for bound in span), max((stop for _, stop in ranges), default=0)]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    return _common(ranges, tuple((low, high) for low, high in gaps if low < high))


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
    boxes = [piece.whole for layout in layouts for piece in layout.pieces if piece.owned]
    disjoint = all(intersection(a, b) is None for a, b in itertools.combinations(boxes, 2))
    return disjoint and sum(map(_size, boxes)) == math.prod(layouts[0].shape)


def _size(box: Iterable[Range]) -> int:
    return math.prod(stop - start for start, stop in box)
