"""Rows from memory, and rows of two text columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from shardwise.data.convert import read_pair
from shardwise.data.detect import PAIR_KEYS
from shardwise.data.format import BadRow
from shardwise.data.memory import memory_records
from shardwise.data.pairs import PairEncoder
from shardwise.data.rows import Source, load_rows
from shardwise.data.source import Record
from shardwise.errors import ConfigError
from shardwise.spec.rules import parse_run

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


class MapStyle(Dataset):  # type: ignore[type-arg]
    """As torch's: no end of its own, an index beyond it would give a row again."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index % 2]


def generate() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        tuple(ROWS),
        MapStyle(),
        generate,
        generate(),
        [{"input_ids": torch.tensor([1, 2, 3])}, {"input_ids": np.array([4, 5])}],
        [{"input_ids": [np.int64(1), 2, 3]}, {"input_ids": (4, 5)}],
    ],
    ids=["list", "tuple", "torch", "function", "generator", "arrays", "numpy scalars"],
)
def test_every_kind_of_data_set_gives_the_same_records(dataset: Any) -> None:
    assert list(memory_records(dataset, "rows")) == [Record(1, ROWS[0]), Record(2, ROWS[1])]


def test_a_data_set_without_end_is_cut_at_max_records() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield ROWS[0]

    assert len(list(memory_records(endless, "rows", 3))) == 3


def test_what_a_table_has_to_leave_empty_is_not_there() -> None:
    """Each row of a table has all columns, and each turn all keys that any turn has."""
    turn = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "default": None}]}
    table = [
        {"input_ids": None, "messages": [{"role": "user", "content": "2 + 3?", "tool_calls": None}, turn]},
        {"input_ids": [1, 2], "messages": None},
    ]
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert list(memory_records(table, "rows")) == [
        Record(1, {"messages": [{"role": "user", "content": "2 + 3?"}, called]}),
        Record(2, {"input_ids": [1, 2]}),
    ]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (7, ["rows of type int", "no data set"]),
        ({"train": ROWS}, ["mapping", "data['train']", "keys train"]),
        (["text"], ["rows, row 1", "str", "dictionary"]),
        ([ROWS[0], ("a", "b")], ["rows, row 2", "tuple"]),
    ],
)
def test_what_is_no_data_set(dataset: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        list(memory_records(dataset, "rows"))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("question", "answer"), PAIR_KEYS)
def test_the_spellings_of_question_and_answer(question: str, answer: str) -> None:
    expected = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert read_pair({question: "Why?", answer: "So.", "id": 3}, (question, answer)).messages == expected


def test_an_instruction_takes_its_input_along() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    columns = ("instruction", "output")
    assert read_pair(row, columns).messages[0]["content"] == "Add\n1 2"
    assert read_pair(row | {"input": ""}, columns).messages[0]["content"] == "Add"


@pytest.mark.parametrize(
    "row", [{"input": "a", "output": ""}, {"input": " ", "output": "b"}, {"input": 1, "output": "b"}]
)
def test_an_empty_or_foreign_column_is_a_bad_row(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match=r"input|output"):
        read_pair(row, ("input", "output"))


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    words = ["?", "<s>", "</s>", "Why", "So", "it", "is", "<user>", "<assistant>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="?")
    fast.add_tokens(["<user>", "<assistant>"], special_tokens=True)
    fast.chat_template = chat_template
    return fast


def test_without_a_template_the_answer_and_the_end_are_supervised() -> None:
    encoder = PairEncoder(tokenizer())
    turns = read_pair({"input": "Why is it", "output": "So it is"}, ("input", "output")).messages
    tokens = encoder({"messages": turns})
    assert encoder.is_plain
    assert tokens.input_ids.tolist() == [3, 6, 5, 4, 5, 6, 2]
    assert tokens.labels.tolist() == [-100, -100, -100, 4, 5, 6, 2]


def test_with_a_template_the_row_is_a_conversation() -> None:
    turns = read_pair({"prompt": "Why is it", "response": "So it is"}, ("prompt", "response")).messages
    for encoder in (PairEncoder(tokenizer(TEMPLATE)), PairEncoder(tokenizer(), TEMPLATE)):
        tokens = encoder({"messages": turns})
        assert not encoder.is_plain
        assert tokens.input_ids.tolist() == [7, 3, 6, 5, 8, 4, 5, 6, 2]  # the template ends no turn
        assert tokens.labels.tolist() == [-100] * 4 + [8, 4, 5, 6, 2]


def test_rows_from_memory_are_named_in_messages_and_the_plain_default_is_told() -> None:
    run, notes = parse_run({"model": "m"}), list[str]()

    def load(rows: list[dict[str, Any]]) -> list[list[int]]:
        records = memory_records(rows, "<train_dataset>")
        source = Source(Path("<train_dataset>"), run, vocab_size=9)
        loaded = load_rows(source, tokenizer, records, notes.append)
        return [row.input_ids.tolist() for row in loaded]

    assert load([{"question": "Why", "answer": "So"}]) == [[3, 4, 2]]
    assert len(notes) == 1
    assert "no chat template" in notes[0]
    with pytest.raises(ConfigError, match=r"<train_dataset>:2: answer is empty"):
        load([{"question": "Why", "answer": "So"}, {"question": "Why", "answer": ""}])
    with pytest.raises(ConfigError, match=r"<train_dataset>: holds no rows"):
        load([])
