from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.data.batch import Batch, LoaderState
from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.order import epoch_order, group_by_length
from shardwise.data.pack import StepSplit, best_fit, lay_out
from shardwise.data.rows import Row
from shardwise.errors import ConfigError
from tests.data.helpers import make_row

lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def rows_of(lengths: list[int]) -> list[Row]:
    """Rows whose ids are all their number, counted from 1; odd ones supervise their last token alone."""
    return [
        make_row(i, [i + 1] * n, [i + 1] * n if i % 2 == 0 else [-100] * (n - 1) + [i + 1])
        for i, n in enumerate(lengths)
    ]


def documents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(ids, targets) of what a model tells apart by its positions, in a batch of one data rank; padding left out."""
    found = []
    for ids, targets, positions, size in zip(
        batch.input_ids.flatten(0, 1).tolist(),
        batch.targets.flatten(0, 1).tolist(),
        batch.position_ids.flatten(0, 1).tolist(),
        batch.lengths.flatten().tolist(),
        strict=True,
    ):
        starts = [place for place in range(size) if positions[place] == 0] + [size]
        for start, end in itertools.pairwise(starts):
            assert positions[start:end] == list(range(end - start))
            found.append((ids[start:end], targets[start:end]))
        assert set(targets[size:]) <= {-100}
    return found


@given(lengths_of_rows, st.integers(0, 30))
def test_best_fit_uses_each_row_once_and_no_more_bins_than_it_promises(lengths: list[int], more: int) -> None:
    capacity = max(lengths) + more
    bins = best_fit(lengths, capacity)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    fills = sorted(sum(lengths[row] for row in rows) for rows in bins)
    assert fills[-1] <= capacity
    assert len(bins) == 1 or fills[0] + fills[1] > capacity  # no two bins would fit into one


def test_best_fit_is_best_fit_decreasing() -> None:
    # 6 and 5 open bins of 10; 4 fills the first, 3 and 2 the second.
    assert best_fit([2, 6, 3, 5, 4], 10) == [[1, 4], [3, 2, 0]]
    with pytest.raises(ValueError, match="11 is above the capacity 10"):
        best_fit([11], 10)


splits = st.builds(StepSplit, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.just(50))


@given(lengths_of_rows, splits)
@example([18, 18, 18, 33, 33], StepSplit(2, 1, 3, 50))  # four bins on three micro-batches take six places
def test_a_packed_step_has_its_rows_once_and_no_more_places_than_one_rank_would_need(
    lengths: list[int], split: StepSplit
) -> None:
    layout = lay_out(np.array(lengths), split)
    plain = lay_out(np.array(lengths), replace(split, capacity=None))
    assert sorted(row for bins in layout.places for rows in bins for row in rows) == list(range(len(lengths)))
    places = layout.num_micro_batches * layout.micro_batch_size
    for packed in layout.places:
        assert len(packed) <= places
        assert all(sum(lengths[row] for row in rows) <= layout.length <= 50 for rows in packed)
    assert layout.micro_batch_size <= split.micro_batch_size
    assert split.min_micro_batches <= layout.num_micro_batches <= plain.num_micro_batches
    fewest = -(-len(best_fit(lengths, 50)) // split.num_data_ranks)
    # Micro-batches of one size: rounding up leaves a place free in all but one of them at the most.
    is_forced = layout.num_micro_batches == split.min_micro_batches
    groups = layout.num_micro_batches if is_forced else min(layout.num_micro_batches, layout.micro_batch_size)
    assert places <= max(fewest, split.min_micro_batches) + groups - 1


def test_more_data_ranks_do_not_leave_more_room() -> None:
    lengths = np.minimum(512, np.exp(np.random.default_rng(0).normal(4.5, 0.8, 256)).astype(int) + 1)
    rates = []
    for ranks in (1, 2, 4, 8, 16):
        layout = lay_out(lengths, StepSplit(1, ranks, 1, 512))
        rates.append(lengths.sum() / layout.num_tokens)
    assert min(rates[:4]) > 0.95
    assert rates[-1] > 0.9  # the last of the ranks may have one place fewer to fill


@given(lengths_of_rows, st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_packed_batches_hold_the_rows_of_the_unpacked_ones(
    lengths: list[int], size: int, micro: int, ranks: int, least: int
) -> None:
    rows, seen = rows_of(lengths), list[dict[bool, list[list[tuple[list[int], list[int]]]]]]()
    for rank in range(ranks):
        settings = LoaderSettings(size, micro, rank, ranks, least, log_rows=True)
        plain, packed = (Loader(rows, replace(settings, packing=on, pack_length=45)) for on in (False, True))
        assert plain.num_steps(2) == packed.num_steps(2)
        seen.append({False: [], True: []})
        for one, other in itertools.islice(zip(plain.batches(), packed.batches(), strict=False), plain.num_steps(2)):
            same = ("num_tokens", "num_input_tokens", "num_rows", "rows", "row_hashes", "epoch", "step_in_epoch")
            for name in (*same, "next_state"):
                assert getattr(one, name) == getattr(other, name)
            seen[-1][False].append(documents(one))
            seen[-1][True].append(documents(other))
            assert 0 < other.fill_rate <= 1
    for step in range(plain.num_steps(2)):  # over all ranks: which of them has a row is packing's to choose
        apart, together = ([text for rank in seen for text in rank[on][step]] for on in (False, True))
        assert sorted(apart) == sorted(together)


def test_every_rank_finds_the_same_shape_and_the_fill_rate_counts_all_of_them() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 64).tolist()
    loaders = [Loader(rows_of(lengths), LoaderSettings(64, 4, r, 3, 2, packing=True, pack_length=64)) for r in range(3)]
    batches = [next(loader.batches()) for loader in loaders]
    assert len({batch.input_ids.shape for batch in batches}) == 1
    assert batches[0].num_computed_tokens == sum(batch.input_ids.numel() for batch in batches)
    packed, unpacked = loaders[0].fill_rates()
    assert packed == batches[0].fill_rate > 0.8 > unpacked


def test_rows_are_packed_up_to_the_longest_where_no_length_is_given() -> None:
    (batch,) = itertools.islice(
        Loader(rows_of([8, 3, 5, 2, 6]), LoaderSettings(5, 8, shuffle=False, packing=True)).batches(), 1
    )
    assert batch.input_ids.shape == (1, 3, 8)
    assert batch.fill_rate == 1.0


def test_positions_of_a_row_are_kept_and_must_begin_at_0_to_be_packed() -> None:
    rows = [make_row(0, [1, 1, 1], None, [0, 1, 0]), make_row(1, [2, 2])]
    (batch,) = itertools.islice(
        Loader(rows, LoaderSettings(2, 1, shuffle=False, packing=True, pack_length=9)).batches(), 1
    )
    assert batch.position_ids.tolist() == [[[0, 1, 0, 0, 1]]]
    late = [*rows, make_row(2, [3, 3], None, [5, 6])]
    with pytest.raises(ConfigError, match=r"row of line 3.*begin at 5.*packing=false"):
        Loader(late, LoaderSettings(2, 1, packing=True))
    assert Loader(late, LoaderSettings(2, 1)).steps_per_epoch == 2


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(0, 5))
def test_grouping_is_a_permutation_that_begins_with_the_longest_row(lengths: list[int], epoch: int) -> None:
    array = np.array(lengths)
    order = group_by_length(epoch_order(len(lengths), True, 1, epoch), array)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert array[order[0]] == array.max()


def test_grouping_leaves_little_padding_and_other_orders_in_other_epochs() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    rows = rows_of(lengths.tolist())
    grouped = Loader(rows, LoaderSettings(8, 8, group_by_length=True))
    assert grouped.fill_rates(10**6)[0] > 0.95 > 0.65 > Loader(rows, LoaderSettings(8, 8)).fill_rates(10**6)[0]
    first, second = ([b.rows for b in itertools.islice(grouped.batches(LoaderState(e)), 250)] for e in (0, 1))
    assert first != second
    assert sorted(row for step in first for row in step) == list(range(2000))


def test_a_grouped_epoch_goes_on_in_the_same_order_with_another_batch() -> None:
    rows = rows_of(np.random.default_rng(0).integers(1, 90, 50).tolist())
    whole = [row for b in itertools.islice(Loader(rows, LoaderSettings(4, 2, group_by_length=True)).batches(), 13)
             for row in b.rows]  # fmt: skip
    other = Loader(rows, LoaderSettings(6, 2, group_by_length=True, packing=False))
    assert [row for b in itertools.islice(other.batches(LoaderState(0, 8)), 7) for row in b.rows] == whole[8:]
