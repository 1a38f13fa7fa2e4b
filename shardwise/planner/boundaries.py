"""Where to cut a model into pipeline stages: the cut whose slowest stage is fastest, under a limit for each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

_HALVINGS = 50

Fits = Callable[[int, int, int], bool]  # stage, first block, end block


def fastest_cut(
    seconds: Sequence[float], first: float, last: float, num_stages: int, fits: Fits | None = None
) -> tuple[int, ...] | None:
    """Blocks of each stage so that the slowest stage is as fast as it can be; None if no cut fits.

    For a bound on a stage's time each stage, from the first, takes as many blocks as it may: what is left for the
    later ones is then least, so the bound can be met if this meets it (each stage keeps one block at least). The
    least bound is found by halving.

    Args:
        seconds: of each block; ``first`` and ``last`` what the first and the last stage take on top.
        fits: whether a stage can hold a range of blocks; must hold for every part of a range that fits.
    """
    sums = [0.0, *accumulate(seconds)]
    low, high = 0.0, sums[-1] + first + last
    best = _take(sums, (first, last), num_stages, high, fits)
    if best is None:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _take(sums, (first, last), num_stages, middle, fits)
        if found is None:
            low = middle
        else:
            best = found
            high = max(_times(sums, (first, last), found))
        if high - low <= 1e-9 * high:
            break
    return best


def _take(
    sums: Sequence[float], ends: tuple[float, float], num_stages: int, most: float, fits: Fits | None
) -> tuple[int, ...] | None:
    num_blocks, start = len(sums) - 1, 0
    sizes = []
    for stage in range(num_stages):
        extra = (ends[0] if stage == 0 else 0.0) + (ends[1] if stage == num_stages - 1 else 0.0)
        highest = num_blocks - (num_stages - 1 - stage)
        low, high = start, highest  # the largest end that stays within the bound
        while low < high:
            middle = (low + high + 1) // 2
            within = sums[middle] - sums[start] + extra <= most * (1 + 1e-12)
            if within and (fits is None or fits(stage, start, middle)):
                low = middle
            else:
                high = middle - 1
        if low == start:
            return None
        sizes.append(low - start)
        start = low
    return tuple(sizes) if start == num_blocks else None


def _times(sums: Sequence[float], ends: tuple[float, float], sizes: tuple[int, ...]) -> list[float]:
    times = [sums[b] - sums[a] for a, b in pairwise(accumulate(sizes, initial=0))]
    times[0] += ends[0]
    times[-1] += ends[1]
    return times
