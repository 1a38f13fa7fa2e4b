"""Stage boundaries against trying all of them."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.boundaries import fastest_cut

BLOCKS = st.lists(st.floats(0.1, 5.0), min_size=2, max_size=8)


def slowest(seconds: list[float], first: float, last: float, stages: tuple[int, ...]) -> float:
    ends = [0]
    for size in stages:
        ends.append(ends[-1] + size)
    times = [sum(seconds[a:b]) for a, b in pairwise(ends)]
    times[0] += first
    times[-1] += last
    return max(times)


def all_cuts(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in pairwise((0, *inner, num_blocks)))
        for inner in combinations(range(1, num_blocks), num_stages - 1)
    ]


@settings(max_examples=60, deadline=None)
@given(seconds=BLOCKS, first=st.floats(0, 6), last=st.floats(0, 6), data=st.data())
def test_no_cut_has_a_faster_slowest_stage(
    seconds: list[float], first: float, last: float, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(seconds)))
    cut = fastest_cut(seconds, first, last, num_stages)
    assert cut is not None
    assert sum(cut) == len(seconds)
    assert min(cut) >= 1
    every = [slowest(seconds, first, last, stages) for stages in all_cuts(len(seconds), num_stages)]
    assert slowest(seconds, first, last, cut) <= min(every) * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(seconds=BLOCKS, room=st.lists(st.integers(0, 5), min_size=8, max_size=8), data=st.data())
def test_a_limit_for_each_stage_is_kept_and_used(seconds: list[float], room: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(seconds)))
    cut = fastest_cut(seconds, 0.0, 0.0, num_stages, lambda stage, start, end: end - start <= room[stage])
    fitting = [
        stages
        for stages in all_cuts(len(seconds), num_stages)
        if all(size <= most for size, most in zip(stages, room, strict=False))
    ]
    assert (cut is None) == (not fitting)
    if cut is not None:
        assert cut in fitting
        assert slowest(seconds, 0, 0, cut) <= min(slowest(seconds, 0, 0, one) for one in fitting) * (1 + 1e-6)
