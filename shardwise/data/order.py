"""Which rows a step holds: a function of seed, epoch and row count alone, never of the split over devices."""

from __future__ import annotations

import numpy as np

_WINDOW = 2048  # rows that are sorted by length among each other
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


def group_by_length(order: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``order`` with rows of about the same length near each other.

    Windows of it (a quarter of the rows, at most 2,048) are sorted by length, by turns falling and rising, so that a
    step seldom holds both ends. The window of the longest row comes first and begins with it: a memory that is too
    small shows in the first step. Like the order itself it does not depend on the batch, so that a run goes on at
    the next row with any batch size.
    """
    size = min(_WINDOW, max(1, -(-len(order) // 4)))
    windows = [order[start : start + size] for start in range(0, len(order), size)]
    first = int(np.argmax([lengths[window].max() for window in windows])) if windows else 0
    turned = windows[first:] + windows[:first]
    return np.concatenate(
        [_by_length(window, lengths, falling=index % 2 == 0) for index, window in enumerate(turned)] or [order]
    )


def _by_length(rows: np.ndarray, lengths: np.ndarray, *, falling: bool) -> np.ndarray:
    return rows[np.argsort(-lengths[rows] if falling else lengths[rows], kind="stable")]


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
