from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.detect import PAIR_KEYS
from shardwise.data.rows import name_lines, name_rows, num_supervised, row_hash
from shardwise.errors import ConfigError
from shardwise.spec.run import COLUMNS
from tests.data.helpers import load, make_row, make_tokenizer, write


def refusal(path: Path, **given: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, **given)
    return str(error.value)


def test_token_rows_with_labels_positions_and_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        [
            {"input_ids": [1, 2, 131], "labels": [-100, 2, 131], "position_ids": [0, 1, 0]},
            {"input_ids": [5], "attention_mask": [1], "note": "kept by its owner"},
        ],
    )
    first, second = load(path)
    assert (first.index, first.line, second.index, second.line) == (0, 1, 1, 2)
    assert first.labels.tolist() == [-100, 2, 131]
    assert first.position_ids is not None
    assert first.position_ids.tolist() == [0, 1, 0]
    assert second.labels.tolist() == [5]
    assert second.position_ids is None
    assert first.input_ids.dtype == first.labels.dtype == np.int32


def test_what_a_mask_has_0_for_is_not_learned(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 0, 1]},
        {"input_ids": [1, 2, 3], "assistant_masks": [0, 1, 1], "completion_mask": [True, True, False]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "loss_mask": [1, 0, 1]},
    ]
    found = [row.labels.tolist() for row in load(write(tmp_path / "d.jsonl", rows))]
    assert found == [[-100, -100, 3], [-100, 2, -100], [-100, -100, 3]]


def test_row_hash_is_sha256_of_little_endian_int32() -> None:
    ids = [1, 70_000, 131]
    assert row_hash(make_row(0, ids)) == hashlib.sha256(struct.pack("<3i", *ids)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([7], "row of line 7"),
        ([7, 3, 4, 5, 4], "rows of lines 3-5, 7"),
        (list(range(1, 200, 2)), f"rows of lines {', '.join(map(str, range(1, 40, 2)))} and 80 more"),
    ],
)
def test_rows_are_named_by_their_lines(lines: list[int], text: str) -> None:
    assert name_lines(lines) == text


def test_rows_of_several_files_are_named_with_them() -> None:
    rows = [replace(make_row(0, [1]), line=line, file=file) for line, file in [(3, "a"), (7, "b"), (4, "a")]]
    assert name_rows(rows) == "rows of lines 3-4 of a, row of line 7 of b"
    assert name_rows(rows[::2]) == "rows of lines 3-4"


def test_the_first_label_predicts_nothing() -> None:
    assert num_supervised(np.array([7, -100, -100])) == 0
    assert num_supervised(np.array([-100, 7, 8])) == 2
    assert num_supervised(np.array([7])) == 0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 132]}, ["id 132", "[0, 132)"]),
        ({"input_ids": [1, -1]}, ["id -1", "[0, 132)"]),
        ({"input_ids": [1, 2**70]}, ["64 bits"]),
        ({"input_ids": [1, True]}, ["bool"]),
        ({"input_ids": [1, 2.0]}, ["float"]),
        ({"input_ids": "12"}, ["str", "list of integers"]),
        ({"input_ids": []}, ["empty"]),
        ({"input_ids": [[1, 2]]}, ["list"]),
        ({"input_ids": [1, 2], "labels": [1]}, ["1 values for 2"]),
        ({"input_ids": [1, 2], "labels": [1, -1]}, ["label", "-1", "-100"]),
        ({"input_ids": [1, 2], "labels": [1, 132]}, ["label", "132"]),
        ({"input_ids": [1, 2], "position_ids": [0, -1]}, ["position -1"]),
        ({"input_ids": [1, 2], "position_ids": [0, 64]}, ["position 64", "[0, 64)"]),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, ["attention_mask", "padding"]),
        ({"text": "once upon a time"}, ["plain text", "'text'", '"input_ids"']),
        ({"instruction": "a", "output": "b"}, ["format alpaca", '"input_ids"']),
        ({"conversations": [{"from": "human", "value": "x"}]}, ["ShareGPT"]),
        ({"chosen": 1, "rejected": 2}, ["preference"]),
        ({"messages": []}, ["format messages", '"input_ids"']),
        ({}, ["empty object"]),
        ([1, 2, 3], ["bare list of token ids"]),
        (7, ["bare int"]),
        (None, ["bare NoneType"]),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_reason(tmp_path: Path, row: Any, words: list[str]) -> None:
    good = {"input_ids": [1, 2, 3]}
    message = refusal(write(tmp_path / "d.jsonl", [good, row, good]), max_positions=64)
    for word in ["d.jsonl:2:", *words]:
        assert word in message


def test_many_bad_rows_make_one_message_with_the_first_few_and_the_count(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2]}, *[{"input_ids": [200 + n]} for n in range(5)]]
    message = refusal(write(tmp_path / "d.jsonl", rows))
    assert "5 of 6 rows" in message
    assert "and 2 more" in message
    assert [f"d.jsonl:{line}: " in message for line in range(1, 7)] == [False, True, True, True, False, False]


def test_the_broken_lines_of_a_file_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n\n{"input_ids": [1, 2\n[1, 2]\n{"input_ids": "x"}\n{"input_ids": [1, 2]}\n')
    message = refusal(path)
    assert "3 of 5 rows" in message
    assert "d.jsonl:3: not JSON" in message
    assert "d.jsonl:4: a bare list" in message
    assert "d.jsonl:5: input_ids" in message


def test_bad_rows_can_be_skipped_with_a_count(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [500]}, {"a": 1}, {"input_ids": [3, 4]}])
    said: list[str] = []
    rows = load(path, on_bad_rows="skip", notify=said.append)
    assert [(row.index, row.line) for row in rows] == [(0, 1), (1, 4)]
    assert len(said) == 1
    assert "2 bad rows" in said[0]
    assert "line 2" in said[0]
    assert "id 500" in said[0]
    all_bad = write(tmp_path / "bad.jsonl", [{"a": 1}, {"a": 1}])
    message = refusal(all_bad, on_bad_rows="skip")
    assert "no valid rows: 2 left out because" in message
    assert "(2)" in message


def test_rows_beyond_the_limit_are_refused_truncated_or_dropped(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 2, 0, 1]},
        {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, 3, 4, 5, 6]},
    ]
    path = write(tmp_path / "d.jsonl", rows)
    message = refusal(path, max_positions=4)
    assert "d.jsonl:2: 5 tokens" in message
    assert "4 positions" in message
    assert "2 such rows" in message
    assert "data.max_length = 3" in refusal(path, max_length=3, max_positions=4)
    assert "4 positions" in refusal(path, max_length=9, max_positions=4)

    said: list[str] = []
    kept = load(path, max_length=4, on_long="truncate", notify=said.append)
    assert [row.input_ids.tolist() for row in kept] == [[1, 2, 3], [1, 2, 3, 4]]
    assert kept[1].position_ids is not None
    assert kept[1].position_ids.tolist() == [0, 1, 2, 0]
    # The third row's answer would not have stayed whole.
    assert any("1 rows longer" in line and "dropped" in line and "line 3" in line for line in said)
    assert any("1 rows cut" in line and "line 2" in line for line in said)

    said.clear()
    assert [row.line for row in load(path, max_length=4, on_long="drop", notify=said.append)] == [1]
    assert len(said) == 1
    assert "2 rows longer" in said[0]
    assert "dropped" in said[0]
    assert len(load(path, max_positions=6)) == 3


def test_long_texts_are_split_and_long_conversations_are_refused(tmp_path: Path) -> None:
    tokenizer, said = make_tokenizer(adds_bos=True), list[str]()
    document = "Write a poem about the sea. " * 9
    path = write(tmp_path / "d.jsonl", [{"text": "Hello"}, {"text": document}])
    rows = load(path, len(tokenizer), tokenizer=lambda: tokenizer, max_length=16, on_long="split", notify=said.append)
    assert [row.line for row in rows] == [1, *[2] * (len(rows) - 1)]
    assert len(rows) > 3
    assert all(row.input_ids[0] == tokenizer.bos_token_id and len(row.input_ids) <= 16 for row in rows)
    whole = [token for row in rows[1:] for token in row.input_ids[1:].tolist()]
    assert tokenizer.decode(whole) == document + "</s>"
    assert said == [f"{path}: 1 texts longer than data.max_length = 16 split, the first on line 2"]
    talk = {"messages": [{"role": "user", "content": document}, {"role": "assistant", "content": "Hi"}]}
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: \d+ tokens are more .*half of a conversation has no answer"):
        load(write(path, [talk]), len(tokenizer), tokenizer=lambda: tokenizer, max_length=16, on_long="split")


def test_columns_are_read_under_the_names_that_are_given_to_them(tmp_path: Path) -> None:
    tokenizer, said = make_tokenizer(), list[str]()
    row = {"q": "Hello", "instruction": "not this", "output": "nor this", "reply": "Hi", "rules": "Be kind."}
    given: dict[str, Any] = {"tokenizer": lambda: tokenizer, "notify": said.append}
    given["columns"] = {"prompt": "q", "response": "reply", "system": "rules"}
    path = write(tmp_path / "d.jsonl", [row, {"q": "Hello", "reply": "Hi"}])
    first, second = load(path, len(tokenizer), **given)
    assert "not this" not in tokenizer.decode(first.input_ids)
    assert tokenizer.decode(first.input_ids).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert tokenizer.decode(second.labels[second.labels != -100]) == "Hi<|im_end|>\n"
    assert said == [f"{path}: columns with text that are not used: instruction, output"]
    with pytest.raises(ConfigError, match=r"d\.jsonl:2: has no column 'reply', which data\.columns names as response"):
        load(write(path, [row, {"q": "Hello"}]), len(tokenizer), **given)


def test_turns_as_text_are_used(tmp_path: Path) -> None:
    tokenizer, said = make_tokenizer(), list[str]()
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    path = write(tmp_path / "d.jsonl", [{"messages": json.dumps(talk), "note": "x"}])
    (row,) = load(path, len(tokenizer), tokenizer=lambda: tokenizer, notify=said.append)
    assert tokenizer.decode(row.labels[row.labels != -100]) == "Hi<|im_end|>\n"
    assert said == [f"{path}: columns with text that are not used: note"]


def test_a_renamed_column_of_a_table_in_text_holds_json_as_under_its_known_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {"tokenizer": make_tokenizer, "columns": {"messages": "chat", "tools": "things"}}
    talk = [{"role": "user", "content": "Hello, you"}, {"role": "assistant", "content": "Hi"}]
    cell = json.dumps(talk).replace('"', '""')
    path = tmp_path / "d.csv"
    path.write_text(f'chat,things\n"{cell}",\n')
    (row,) = load(path, len(make_tokenizer()), **given)
    (want,) = load(write(tmp_path / "d.jsonl", [{"chat": talk}]), len(make_tokenizer()), **given)
    assert row.labels.tolist() == want.labels.tolist()


def test_every_column_that_formats_know_can_be_given() -> None:
    assert {name for keys in PAIR_KEYS for name in keys} <= set(COLUMNS)
    assert {"text", "messages", "conversations", "input_ids"} <= set(COLUMNS)


def test_a_set_without_any_supervised_token_is_refused_and_a_single_row_is_not(tmp_path: Path) -> None:
    masked = {"input_ids": [1, 2, 3], "labels": [1, -100, -100]}
    path = write(tmp_path / "d.jsonl", [masked, {"input_ids": [4]}])
    assert "none of 2 rows has a supervised token" in refusal(path)
    assert len(load(write(tmp_path / "e.jsonl", [masked, {"input_ids": [4]}, {"input_ids": [4, 5]}]))) == 3


def test_a_set_of_rows_that_are_all_too_long_is_told_so(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 3, 4, 5]}])
    told = refusal(path, max_length=3, on_long="drop", notify=lambda _: None)
    assert "no row is left: 2 of 2 are longer than data.max_length = 3, the longest 5" in told


def test_no_row_survives_a_short_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [1, 2, 3]}])
    assert "data.max_length = 2" in refusal(path, max_length=2, on_long="drop", notify=lambda _: None)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert "holds no rows" in refusal(write(tmp_path / "d.jsonl", []))


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [n, n]} for n in range(5)])
    assert [row.input_ids[0] for row in load(path, max_samples=2)] == [0, 1]


def test_a_given_format_is_binding(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    assert "d.jsonl:1: a row of format messages" in refusal(path, format="tokens")
