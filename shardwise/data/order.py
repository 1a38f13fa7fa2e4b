"""Which rows a step holds: a function of seed, epoch and row count alone, never of the split over devices."""

from __future__ import annotations

import numpy as np

_STREAM = 0x5EED  # keeps the order's random numbers apart from every other use of the same seed


def epoch_order(num_rows: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Global row indices in the order of one epoch, int64 [num_rows].

    The order is part of the product's contract: it sorts raw 64-bit words of a Philox generator, whose stream numpy
    promises never to change (``Generator.permutation`` gives no such promise), and the sort is stable.
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_STREAM, epoch))).random_raw(num_rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def steps_per_epoch(num_rows: int, global_batch_size: int, drop_last: bool) -> int:
    """Steps in ``num_rows`` rows: the last one may be shorter, with ``drop_last`` it is left out."""
    return num_rows // global_batch_size if drop_last else -(-num_rows // global_batch_size)


def step_rows(order: np.ndarray, rows_seen: int, global_batch_size: int) -> np.ndarray:
    """The rows of the step that follows ``rows_seen`` rows of the epoch: at most ``global_batch_size``."""
    return order[rows_seen : rows_seen + global_batch_size]


def rank_bounds(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Bounds ``[start, end)`` of a rank's contiguous share; the first ``num_rows % num_ranks`` ranks have one more."""
    share, rest = divmod(num_rows, num_ranks)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)
