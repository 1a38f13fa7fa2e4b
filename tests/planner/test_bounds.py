"""The least time of a pipeline against every cut of it, simulated."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.boundaries import fastest_cut
from shardwise.planner.bounds import least_blocks
from shardwise.planner.simulate import simulate
from shardwise.spec.schedule import action_lists
from shardwise.spec.strategy import default_stages

FORWARD = 1 / 3


def simulated(schedule: str, stages: tuple[int, ...], number: int, virtual: int, later: float, last: float) -> float:
    """Seconds of a step whose blocks take a unit."""
    work = [float(size) for size in stages]
    work[-1] += last
    forward, backward = [FORWARD * one for one in work], [(1 - FORWARD) * one for one in work]
    ranks = len(stages) // virtual
    waiting = [later * size for size in stages] if schedule == "zero_bubble" else []
    lists = action_lists(schedule, ranks, number, virtual)
    return simulate(lists, forward, backward, lambda first, second: 0.0, waiting).seconds


def cuts(blocks: int, stages: int) -> list[tuple[int, ...]]:
    inner = [(0, *places, blocks) for places in combinations(range(1, blocks), stages - 1)]
    return [tuple(b - a for a, b in pairwise(places)) for places in inner]


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(["1f1b", "zero_bubble"]),
    pp=st.integers(2, 4),
    blocks=st.integers(4, 9),
    more=st.integers(0, 9),
    later=st.sampled_from([0.1, 0.25, 0.33]),
    last=st.sampled_from([0.0, 0.4, 2.0]),
)
def test_no_cut_is_faster(schedule: str, pp: int, blocks: int, more: int, later: float, last: float) -> None:
    later = later if schedule == "zero_bubble" else 0.0
    least = least_blocks(blocks, pp, pp + more, 1, later, FORWARD, last)
    times = [simulated(schedule, stages, pp + more, 1, later, last) for stages in cuts(blocks, pp)]
    assert least <= min(times) * (1 + 1e-6)
    assert last or min(times) <= 1.4 * least


@settings(max_examples=40, deadline=None)
@given(
    pp=st.integers(2, 5),
    virtual=st.integers(2, 4),
    more=st.integers(0, 9),
    blocks=st.integers(0, 14),
    last=st.sampled_from([0.0, 0.4, 2.0]),
)
def test_no_even_cut_of_several_stages_is_faster(pp: int, virtual: int, more: int, blocks: int, last: float) -> None:
    blocks += pp * virtual
    least = least_blocks(blocks, pp, pp + more, virtual, 0.0, FORWARD, last)
    tried = [fastest_cut([1.0] * blocks, 0.0, last, pp * virtual), default_stages(blocks, pp * virtual)]
    for stages in tried:
        assert stages is not None
        assert least <= simulated("interleaved", stages, pp + more, virtual, 0.0, last) * (1 + 1e-6)


def test_even_cuts_are_met() -> None:
    """(M + p - 1) / p of all blocks, the time of 1F1B; a head behind the last block is counted."""
    assert least_blocks(80, 8, 64, 1, 0.0, FORWARD, 0.0) == pytest.approx(704)  # a cut that is uneven at its ends
    assert least_blocks(8, 8, 64, 1, 0.0, FORWARD, 0.0) == pytest.approx(71)
    assert least_blocks(8, 8, 64, 1, 0.0, FORWARD, 1.0) == pytest.approx(64 * 2)
    assert least_blocks(64, 8, 64, 8, 0.0, FORWARD, 0.0) == pytest.approx(64 * 8 + 7)
