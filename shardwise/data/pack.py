"""How the rows of a step lie in its micro-batches: one behind the other, several in one (packed), or each by itself.

Packing changes where a row lies and nothing else: a step holds the same rows as without, and so the loss, the order,
the number of steps and the place at which a run goes on stay what they are. The rows of a step are packed together and
then dealt out to the data ranks, so that more ranks do not leave more room. Which rows lie together follows from their
lengths alone, so every rank finds the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.data.order import rank_bounds

Bins = list[list[int]]  # numbers of rows by the place that they share


@dataclass(frozen=True)
class StepSplit:
    """How a step is cut: ``micro_batch_size`` places of one forward on a data rank, at least ``min_micro_batches``.

    ``capacity``: tokens that rows share a place up to; None: each row has a place of its own.
    """

    micro_batch_size: int
    num_data_ranks: int = 1
    min_micro_batches: int = 1
    capacity: int | None = None


@dataclass(frozen=True)
class StepLayout:
    """M micro-batches of m places of L tokens on each data rank, and by rank the rows of each place.

    ``places`` hold numbers of the step's rows, from 0; the places behind them are empty.
    """

    num_micro_batches: int
    micro_batch_size: int
    length: int
    places: tuple[Bins, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens over all data ranks, padding included."""
        return self.num_micro_batches * self.micro_batch_size * self.length * len(self.places)


def lay_out(lengths: np.ndarray, split: StepSplit) -> StepLayout:
    """The layout of a step whose rows have ``lengths``, int [rows]; no row is longer than the capacity."""
    ranks = split.num_data_ranks
    if split.capacity is None:
        bounds = [rank_bounds(len(lengths), rank, ranks) for rank in range(ranks)]
        largest = max(end - start for start, end in bounds)
        number = max(-(-largest // split.micro_batch_size), split.min_micro_batches)
        places = tuple([[row] for row in range(start, end)] for start, end in bounds)
        return StepLayout(number, split.micro_batch_size, int(lengths.max()), places)
    sizes: list[int] = lengths.tolist()
    fewest = -(-len(best_fit(sizes, split.capacity)) // ranks)  # of one rank
    number = max(-(-fewest // split.micro_batch_size), split.min_micro_batches)
    size = -(-fewest // number)  # no more places than are needed
    bins = _shortest(sizes, ranks * number * size, split.capacity)
    shares = (rank_bounds(len(bins), rank, ranks) for rank in range(ranks))
    return StepLayout(number, size, _fill(sizes, bins), tuple(bins[start:end] for start, end in shares))


def best_fit(lengths: Sequence[int], capacity: int) -> Bins:
    """Bins of at most ``capacity``, by best-fit decreasing: the longest first, each where the least room is left.

    At most 11/9 of the fewest possible and one more (Johnson 1973).

    Raises:
        ValueError: a length above ``capacity``.
    """
    bins: Bins = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a bin has room for r
    for row in _longest_first(lengths):
        size = lengths[row]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # the lowest bit that is set
            place = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        elif size > capacity:
            raise ValueError(f"{size} is above the capacity {capacity}")
        else:
            room, place = capacity, len(bins)
            bins.append([])
        bins[place].append(row)
        if room > size:
            by_room.setdefault(room - size, []).append(place)
            rooms |= 1 << (room - size)
    return bins


def _longest_first(lengths: Sequence[int]) -> list[int]:
    order: list[int] = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return order


def _spread(lengths: Sequence[int], num_bins: int) -> Bins:
    """All rows in ``num_bins`` bins of about the same sum: the longest first, each where the least lies."""
    bins: Bins = [[] for _ in range(num_bins)]
    sums = [(0, place) for place in range(num_bins)]
    for row in _longest_first(lengths):
        total, place = sums[0]
        bins[place].append(row)
        heapq.heapreplace(sums, (total + lengths[row], place))
    return bins


def _shortest(lengths: Sequence[int], num_bins: int, capacity: int) -> Bins:
    """The rows in at most ``num_bins`` bins, in file order: evenly where that keeps to ``capacity``."""
    bins = _spread(lengths, num_bins)
    if _fill(lengths, bins) > capacity:
        bins = best_fit(lengths, capacity)
    return sorted(sorted(rows) for rows in bins if rows)


def _fill(lengths: Sequence[int], bins: Bins) -> int:
    return max((sum(lengths[row] for row in rows) for rows in bins), default=0)
