from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shardwise.data.order import epoch_order, rank_bounds, steps_per_epoch


@hypothesis_settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_is_a_permutation_of_seed_and_epoch(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, True, seed, epoch)
    assert sorted(order.tolist()) == list(range(num_rows))
    assert np.array_equal(order, epoch_order(num_rows, True, seed, epoch))
    assert epoch_order(num_rows, False, seed, epoch).tolist() == list(range(num_rows))


def test_orders_differ_by_seed_and_by_epoch() -> None:
    orders = {tuple(epoch_order(50, True, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_never_changes() -> None:
    # Written down: a run that is resumed with a later version must go on in the same order.
    assert epoch_order(10, True, 42, 0).tolist() == [9, 8, 0, 3, 4, 2, 1, 5, 7, 6]
    assert epoch_order(10, True, 42, 1).tolist() == [9, 5, 4, 3, 7, 1, 8, 0, 2, 6]


def test_every_place_of_a_row_is_as_likely() -> None:
    places = np.array([epoch_order(6, True, 1, epoch).argsort()[0] for epoch in range(3000)])
    assert abs(np.bincount(places, minlength=6) - 500).max() < 100


@hypothesis_settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 9))
def test_ranks_share_rows_contiguously_and_evenly(num_rows: int, num_ranks: int) -> None:
    shares = [list(range(*rank_bounds(num_rows, rank, num_ranks))) for rank in range(num_ranks)]
    assert shares == [part.tolist() for part in np.array_split(np.arange(num_rows), num_ranks)]


def test_steps_per_epoch_counts_the_short_one() -> None:
    assert steps_per_epoch(10, 4, False) == 3
    assert steps_per_epoch(10, 4, True) == 2
    assert steps_per_epoch(8, 4, False) == 2
    assert steps_per_epoch(3, 4, True) == 0
