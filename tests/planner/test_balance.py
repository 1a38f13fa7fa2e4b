"""Where stages are cut: as good as the best of all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.balance import balanced_stages


def slowest(seconds: list[float], stages: tuple[int, ...], before: float, after: float) -> float:
    times, start = [], 0
    for size in stages:
        times.append(sum(seconds[start : start + size]))
        start += size
    times[0] += before
    times[-1] += after
    return max(times)


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=8),
    stages=st.integers(1, 4),
    before=st.floats(0.0, 3.0),
    after=st.floats(0.0, 3.0),
)
def test_no_cut_is_better(seconds: list[float], stages: int, before: float, after: float) -> None:
    stages = min(stages, len(seconds))
    cuts = combinations(range(1, len(seconds)), stages - 1)
    every = [tuple(b - a for a, b in pairwise([0, *cut, len(seconds)])) for cut in cuts]
    best = min(slowest(seconds, cut, before, after) for cut in every)
    found = balanced_stages(seconds, stages, before, after)
    assert sum(found) == len(seconds)
    assert min(found) > 0
    assert slowest(seconds, found, before, after) == pytest.approx(best)


def test_the_head_takes_the_place_of_blocks() -> None:
    assert balanced_stages([1.0] * 12, 4, 0.0, 3.0) == (3, 4, 4, 1)
