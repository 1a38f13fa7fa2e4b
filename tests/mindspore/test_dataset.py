"""``GeneratorDataset``: rows, columns and batches as a script for MindSpore writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.mindspore.dataset import GeneratorDataset

PAIRS = [("a", "b"), ("c", "d"), ("e", "f")]
COLUMNS = ["input", "output"]


def generate() -> Iterator[tuple[str, str]]:
    yield from PAIRS


class RandomAccess:
    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return PAIRS[index]


def rows(*places: int) -> list[dict[str, str]]:
    return [dict(zip(COLUMNS, PAIRS[place], strict=True)) for place in places]


@pytest.mark.parametrize("source", [generate, PAIRS, RandomAccess()], ids=["function", "list", "random access"])
def test_every_source_gives_the_rows_again_and_again(source: Any) -> None:
    dataset = GeneratorDataset(source, COLUMNS)
    assert list(dataset) == list(dataset) == rows(0, 1, 2)
    assert dataset.get_col_names() == COLUMNS


def test_only_random_access_is_shuffled_unless_it_is_said() -> None:
    assert GeneratorDataset(generate, COLUMNS).keys_given == {"shuffle": False}
    assert GeneratorDataset(RandomAccess(), COLUMNS).keys_given == {"shuffle": True}
    assert GeneratorDataset(RandomAccess(), COLUMNS, shuffle=False).keys_given == {"shuffle": False}
    assert GeneratorDataset(generate, COLUMNS).shuffle(16).keys_given == {"shuffle": True}


def test_batch_keeps_the_rows_and_notes_its_size() -> None:
    plain = GeneratorDataset(generate, COLUMNS)
    dataset = plain.batch(2)
    assert list(dataset) == rows(0, 1, 2)
    assert (dataset.batch_size_given, plain.batch_size_given) == (2, None)
    assert (dataset.get_batch_size(), dataset.get_dataset_size()) == (2, 2)
    whole = plain.batch(2, drop_remainder=True)
    assert whole.keys_given["drop_last"] is True
    assert whole.get_dataset_size() == 1


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda data: data.repeat(2), (0, 1, 2, 0, 1, 2)),
        (lambda data: data.take(2), (0, 1)),
        (lambda data: data.skip(1), (1, 2)),
        (lambda data: data.take(2).skip(1), (1,)),
        (lambda data: data.skip(1).take(1), (1,)),
        (lambda data: data.take(1).repeat(3), (0, 0, 0)),
        (lambda data: data.take(), (0, 1, 2)),
        (lambda data: data.take(9).skip(9), ()),
        (lambda data: data.skip(2).skip(1), ()),
        (lambda data: data.repeat(2).take(4), (0, 1, 2, 0)),  # of the repeated rows
        (lambda data: data.repeat(2).skip(4), (1, 2)),
        (lambda data: data.batch(2).take(1), (0, 1)),  # of batches
        (lambda data: data.batch(2).skip(1), (2,)),
        (lambda data: data.batch(2).skip(1).repeat(2), (2, 2)),
        (lambda data: data.batch(2).repeat(2).take(3), (0, 1, 2, 0, 1)),
        (lambda data: data.batch(2).repeat(2).skip(1), (2, 0, 1, 2)),
        (lambda data: data.repeat(2).batch(2).take(2), (0, 1, 2, 0)),  # a batch over the end of a repetition
        (lambda data: data.take(1).batch(2).take(1), (0,)),
        (lambda data: data.batch(2, drop_remainder=True).repeat(2), (0, 1, 0, 1)),
        (lambda data: data.batch(2, drop_remainder=True).skip(1), ()),
        (lambda data: data.batch(2).take(1).map(lambda text: text, "input"), (0, 1)),
    ],
)
def test_repeat_take_and_skip(change: Callable[[GeneratorDataset], GeneratorDataset], places: tuple[int, ...]) -> None:
    assert list(change(GeneratorDataset(generate, COLUMNS))) == rows(*places)


def test_num_samples_is_the_number_of_rows() -> None:
    assert list(GeneratorDataset(generate, COLUMNS, num_samples=2)) == rows(0, 1)


def test_map_changes_columns_and_leaves_the_data_set_as_it_was() -> None:
    plain = GeneratorDataset(generate, COLUMNS)
    assert next(iter(plain.map(str.upper, "input"))) == {"input": "A", "output": "b"}
    swapped = plain.map([lambda a, b: (b, a)], COLUMNS)
    assert next(iter(swapped)) == {"input": "b", "output": "a"}
    joined = plain.map(lambda a, b: a + b, COLUMNS, ["text"])
    assert next(iter(joined)) == {"text": "ab"}
    assert joined.get_col_names() == ["text"]
    assert list(plain) == rows(0, 1, 2)


def test_one_column_needs_no_tuple() -> None:
    assert list(GeneratorDataset([[1, 2], [3]], "input_ids")) == [{"input_ids": [1, 2]}, {"input_ids": [3]}]


def test_dict_iterator_goes_through_the_rows_for_each_epoch() -> None:
    assert list(GeneratorDataset(generate, COLUMNS).create_dict_iterator(2)) == rows(0, 1, 2, 0, 1, 2)


def test_an_argument_without_effect_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    GeneratorDataset(generate, COLUMNS, num_shards=2, shard_id=0)
    told = capsys.readouterr().err
    assert "GeneratorDataset(num_shards=2) has no effect: the Trainer hands the rows out" in told
    assert "shard_id=0" in told


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GeneratorDataset(generate), ["column_names", "missing"]),
        (lambda: GeneratorDataset(3, COLUMNS), ["source of type int"]),
        (lambda: GeneratorDataset(generate, COLUMNS, suffle=True), ["unknown argument", "shuffle?"]),
        (lambda: GeneratorDataset(generate, COLUMNS, sampler=1), ["sampler", "not supported"]),
        (lambda: list(GeneratorDataset(generate, ["a"])), ["2 values a row", "has 1"]),
        (lambda: GeneratorDataset(generate, COLUMNS).batch(0), ["batch_size = 0"]),
        (lambda: GeneratorDataset(generate, COLUMNS).batch(2, per_batch_map=len), ["per_batch_map"]),
        (lambda: GeneratorDataset(generate, COLUMNS).batch(2).batch(2), ["batches of batches"]),
        (lambda: GeneratorDataset(generate, COLUMNS).take(0), ["take = 0", "above 0"]),
        (lambda: GeneratorDataset(generate, COLUMNS).skip(-1), ["skip = -1", "above 0"]),
        (lambda: GeneratorDataset(generate, COLUMNS).repeat(), ["never end", "epochs"]),
        (lambda: GeneratorDataset(generate, COLUMNS).map(len, "text"), ["input_columns = ['text']", "input, output"]),
    ],
)
def test_what_is_refused(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_what_a_data_set_was_made_from_stays_as_it_was() -> None:
    plain = GeneratorDataset(generate, COLUMNS)
    batches = plain.batch(2)
    batches.take(1)
    plain.skip(1)
    assert list(plain) == list(batches) == rows(0, 1, 2)


def test_the_size_after_take_counts_the_batches_that_are_left() -> None:
    data = GeneratorDataset(generate, COLUMNS).batch(2)
    assert [data.take(1).get_dataset_size(), data.skip(1).get_dataset_size()] == [1, 1]
    assert data.take(1).batch_size_given == 2


def test_rows_are_filtered_renamed_and_projected_in_the_order_of_the_calls() -> None:
    dataset = GeneratorDataset(PAIRS, COLUMNS).filter(lambda text: text != "a", "input")
    assert list(dataset) == rows(1, 2)
    assert list(dataset.take(1)) == rows(1)
    assert list(GeneratorDataset(PAIRS, COLUMNS).take(1).filter(lambda first, second: first != "a")) == []
    renamed = dataset.rename(["output", "input"], ["answer", "question"])
    assert renamed.get_col_names() == ["question", "answer"]
    assert list(renamed.project("answer")) == [{"answer": "d"}, {"answer": "f"}]
    assert list(renamed.batch(1).skip(1).project(["answer"]).map(str.upper, "answer")) == [{"answer": "F"}]
    assert dataset.get_dataset_size() == 2


def test_the_iterators_go_through_the_rows_as_often_as_it_is_said() -> None:
    dataset = GeneratorDataset(PAIRS, COLUMNS).take(2)
    assert list(dataset.create_dict_iterator(num_epochs=2)) == rows(0, 1) * 2
    assert list(dataset.create_tuple_iterator(["output", "input"])) == [("b", "a"), ("d", "c")]
    endless = dataset.create_tuple_iterator(num_epochs=-1, output_numpy=True)
    assert [next(endless) for _ in range(5)] == [*PAIRS[:2], *PAIRS[:2], PAIRS[0]]
    with pytest.raises(ConfigError, match="num_epochs = 0"):
        next(dataset.create_dict_iterator(num_epochs=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda dataset: dataset.batch(2).filter(bool), "filter\\(\\) after batch"),
        (lambda dataset: dataset.filter(bool, "text"), "input_columns = \\['text'\\]: the columns are input, output"),
        (lambda dataset: dataset.project("text"), "the columns are input, output"),
        (lambda dataset: dataset.rename("input", ["a", "b"]), "1 input_columns for 2 names"),
        (lambda dataset: dataset.rename("input", "output"), "would name the columns"),
        (lambda dataset: dataset.concat([dataset]), "GeneratorDataset.concat: is not there: join the rows"),
        (lambda dataset: dataset.split([0.5, 0.5]), "data.val_size"),
    ],
)
def test_what_cannot_be_done_with_rows_is_refused(change: Callable[[GeneratorDataset], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        change(GeneratorDataset(PAIRS, COLUMNS))
