"""Faults that other trainers had with the order, the last batch and the resumption of their data, by their kind."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shardwise.data.batch import Batch, LoaderState
from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.rows import Row
from tests.data.helpers import CHATML, load, make_row, make_tokenizer, write


def _rows(num_rows: int, length: int = 3) -> list[Row]:
    """Rows of equal length, each with ids of its own (row 0 too: padding is 0)."""
    return [make_row(index, [index + 1] * length) for index in range(num_rows)]


def _take(loader: Loader, count: int, state: LoaderState | None = None) -> list[Batch]:
    return list(itertools.islice(loader.batches(state or LoaderState()), count))


def _ids(batch: Batch) -> list[int]:
    """First id of each row that stands in this rank's tensors, filler left out."""
    return [first for first in batch.input_ids.flatten(0, 1)[:, 0].tolist() if first]


def test_the_short_window_at_the_end_of_an_epoch_has_its_own_divisor() -> None:
    # 10 equal rows, 4 a step, 1 a micro-batch: the loss of a step is the sum over its tokens by num_tokens.
    loader = Loader(_rows(10), LoaderSettings(4, 1))
    steps = _take(loader, loader.num_steps(1))
    assert [step.num_rows for step in steps] == [4, 4, 2]
    assert [step.num_tokens / step.num_rows for step in steps] == [2, 2, 2]
    assert [int((step.targets != -100).sum()) for step in steps] == [step.num_tokens for step in steps]
    assert sorted(first for step in steps for first in _ids(step)) == list(range(1, 11))


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 2), (2, 2), (4, 2), (3, 1)])
def test_a_step_holds_the_rows_that_it_reports_also_when_they_do_not_divide(
    num_ranks: int, micro_batch_size: int
) -> None:
    parts = [
        _take(Loader(_rows(20), LoaderSettings(10, micro_batch_size, rank, num_ranks)), 2) for rank in range(num_ranks)
    ]
    for step in range(2):
        assert {part[step].num_rows for part in parts} == {10}
        assert sum(len(_ids(part[step])) for part in parts) == 10
        assert len({part[step].input_ids.shape for part in parts}) == 1


@pytest.mark.parametrize("rows_of_a_rank", [1, 2, 3, 5])
def test_rows_that_do_not_divide_into_micro_batches_are_filled_up_unsupervised(rows_of_a_rank: int) -> None:
    loader = Loader(_rows(rows_of_a_rank), LoaderSettings(5, 3, min_micro_batches=2, shuffle=False))
    (batch,) = _take(loader, 1)
    assert batch.input_ids.shape == (2, 3, 3)
    supervised = (batch.targets.flatten(0, 1) != -100).any(dim=1).tolist()
    assert supervised == [True] * rows_of_a_rank + [False] * (6 - rows_of_a_rank)


def test_the_rows_depend_on_the_data_rank_alone_and_differ_between_data_ranks() -> None:
    # Tensor and pipeline ranks of one data rank build their loader from the same two numbers.
    twins = [[_take(Loader(_rows(8), LoaderSettings(4, 1, rank, 2)), 2) for rank in range(2)] for _ in range(2)]
    assert [[_ids(b) for b in part] for part in twins[0]] == [[_ids(b) for b in part] for part in twins[1]]
    seen = [first for part in twins[0] for batch in part for first in _ids(batch)]
    assert sorted(seen) == list(range(1, 9))


def test_an_incomplete_last_batch_keeps_the_shape_that_the_pipeline_needs() -> None:
    settings = {"micro_batch_size": 2, "min_micro_batches": 2, "shuffle": False}
    keep = Loader(_rows(10), LoaderSettings(4, **settings))
    assert {batch.input_ids.shape for batch in _take(keep, 6)} == {(2, 2, 3)}
    drop = Loader(_rows(10), LoaderSettings(4, drop_last=True, **settings))
    assert (keep.num_steps(2), drop.num_steps(2), drop.dropped_rows) == (6, 4, 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_data_rank_has_the_same_number_of_evaluation_batches(num_ranks: int) -> None:
    parts = [list(Loader(_rows(5), LoaderSettings(4, 2, r, num_ranks, 2)).eval_batches(2)) for r in range(num_ranks)]
    assert {len(part) for part in parts} == {3}
    assert sorted(first for part in parts for batch in part for first in _ids(batch)) == [1, 2, 3, 4, 5]
    assert sum(batch.num_tokens for batch in parts[0]) == 10


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resuming_again_and_again_in_one_epoch_gives_the_uninterrupted_order(num_ranks: int) -> None:
    settings = LoaderSettings(4, 1, 0, num_ranks, seed=3, log_rows=True)
    whole = [batch.row_hashes for batch in _take(Loader(_rows(20), settings), 15)]
    state, hashes = LoaderState(), []
    for count in (1, 1, 1, 12):  # stopped after steps 1, 2 and 3
        for batch in _take(Loader(_rows(20), settings), count, state):
            hashes.append(batch.row_hashes)
            state = LoaderState.from_json(batch.next_state.to_json())
    assert hashes == whole
    assert state == LoaderState(3, 0)


def test_resume_counts_rows_whatever_the_batch_and_the_ranks() -> None:
    before = Loader(_rows(32), LoaderSettings(4, 1, seed=7))
    whole = [row for batch in _take(before, 8) for row in batch.rows]
    state = _take(before, 3)[-1].next_state
    for changed, steps in [
        (LoaderSettings(4, 4, seed=7), 5),
        (LoaderSettings(8, 1, seed=7), 3),
        (LoaderSettings(4, 1, 1, 2, seed=7), 5),
    ]:
        loader = Loader(_rows(32), changed)
        assert loader.num_steps(1, state) == steps
        assert [row for batch in _take(loader, steps, state) for row in batch.rows] == whole[12:]


def test_the_real_end_mark_is_supervised_where_it_is_the_padding_token_and_padding_is_not(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>\n", "</s>"))
    tokenizer.pad_token = tokenizer.eos_token
    turns = [("Hello", "Hi"), ("Write a poem about the sea.", "I am fine, thank you.")]
    talks = [
        {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}
        for said, answer in turns
    ]
    rows = load(write(tmp_path / "d.jsonl", talks), len(tokenizer), tokenizer=lambda: tokenizer)
    (batch,) = _take(Loader(rows, LoaderSettings(2, 2, shuffle=False)), 1)
    targets = batch.targets[0]
    assert (targets == tokenizer.eos_token_id).sum(dim=1).tolist() == [1, 1]
    for row, target in zip(rows, targets, strict=True):
        size = len(row.input_ids)
        assert target[size - 2] == tokenizer.eos_token_id
        assert (target[size - 1 :] == -100).all()


def test_a_tokenizer_without_a_padding_token_trains_in_batches_and_gains_no_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.pad_token is None
    size = len(tokenizer)
    talks = [
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]}
        for answer in ("Hi", "I am fine, thank you.")
    ]
    rows = load(write(tmp_path / "d.jsonl", talks), size, tokenizer=lambda: tokenizer)
    together = _take(Loader(rows, LoaderSettings(2, 2, shuffle=False)), 1)[0]
    apart = _take(Loader(rows, LoaderSettings(1, 1, shuffle=False)), 2)
    assert together.num_tokens == sum(batch.num_tokens for batch in apart)
    assert 0 <= int(together.input_ids.min()) <= int(together.input_ids.max()) < size == len(tokenizer)


def test_5_rows_on_2_data_ranks_of_2_are_all_used_once() -> None:
    parts = [_take(Loader(_rows(5), LoaderSettings(4, 2, rank, 2, shuffle=False)), 2) for rank in range(2)]
    assert [[_ids(batch) for batch in part] for part in parts] == [[[1, 2], [5]], [[3, 4], []]]
    assert [[batch.input_ids.shape for batch in part] for part in parts] == [[(1, 2, 3)] * 2] * 2
    assert [batch.num_tokens for batch in parts[0]] == [batch.num_tokens for batch in parts[1]] == [8, 2]
