"""Parts of a dim: what ranks hold covers it once, and is found again from what they need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.tensor.parts import Part, find_parts, intervals, part_ranges, scaled

PARTS = st.lists(st.integers(1, 12).map(Part), min_size=1, max_size=5)


def _held(parts, degree):
    return [
        [i for start, stop in part_ranges(parts, degree, rank) for i in range(start, stop)] for rank in range(degree)
    ]


def _size(parts):
    return sum(part.size for part in parts)


@given(PARTS, st.integers(1, 5))
def test_the_ranks_hold_every_index_once(parts, degree):
    held = _held(parts, degree)
    assert sorted(i for indices in held for i in indices) == list(range(_size(parts)))
    assert all(indices == sorted(indices) for indices in held)


@given(PARTS, st.integers(2, 5))
def test_parts_are_found_from_what_each_rank_needs(parts, degree):
    held = _held(parts, degree)
    found = find_parts(held, _size(parts))
    if found is None:  # a part of which some rank has nothing, as torch.chunk cuts it
        assert any((degree - 1) * -(-part.size // degree) >= part.size for part in parts)
    else:
        assert _held(found, degree) == held


@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_shared_heads_are_found_beside_split_ones(width, units, per_rank):
    """Query heads for each rank, key and value heads for several of them, in one matrix."""
    degree = 8
    parts = (Part(degree * per_rank * width), Part(units * width, units), Part(units * width, units))
    held = _held(parts, degree)
    found = find_parts(held, _size(parts))
    assert found is not None
    assert _held(found, degree) == held
    assert found[0] == parts[0]


def test_what_is_no_split_by_parts_is_none():
    assert find_parts([[0, 1], [1, 2]], 3) is None  # an element that two ranks need
    assert find_parts([[0], [2]], 3) is None  # an element that none needs
    assert find_parts([[1], [0]], 2) is None  # the other way round
    assert find_parts([[0, 1, 2], [3]], 4) is None  # uneven in another way than torch.chunk's


def test_shared_units():
    assert find_parts([[0, 1], [0, 1], [2, 3], [2, 3]], 4) == (Part(4, 2),)
    assert find_parts([[0, 1], [2, 3], [0, 1], [2, 3]], 4) is None
    assert find_parts([[0, 1], [2, 3]], 4) == (Part(4),)
    assert find_parts([[0, 1, 2, 3]] * 4, 4) is None  # all of it on every rank


def test_intervals_and_scaling():
    assert intervals([0, 1, 4, 5, 6]) == ((0, 2), (4, 7))
    assert scaled((Part(32), Part(16, 2), Part(16, 2)), 256) == (Part(128), Part(64, 2), Part(64, 2))
    assert scaled((Part(32), Part(16)), 100) is None
