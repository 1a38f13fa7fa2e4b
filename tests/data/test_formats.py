"""Rows as other tools write them: found by their columns, and turned into one inner form."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.convert import read_row, unused_columns
from shardwise.data.detect import check_format, format_of
from shardwise.data.encode import RowEncoder
from shardwise.data.format import BadRow, Conversation, Sample, Text
from tests.data.helpers import make_tokenizer

USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
TALK = [USER, ASSISTANT]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def read(value: dict[str, Any]) -> Sample:
    kind = format_of(value)
    assert kind is not None
    return read_row(value, kind, 100, None)


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"messages": TALK, "id": 3}, "messages", Conversation(TALK)),
        ({"conversations": TALK}, "messages", Conversation(TALK)),
        ({"messages": [USER | {"content": [{"type": "text", "text": "Why?"}]}, ASSISTANT]}, "messages", TALK),
        (
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
            "sharegpt",
            Conversation(TALK),
        ),
        (
            {"conversation": [{"from": "user", "value": "Why?"}, {"from": "Assistant", "value": "So."}], "system": "S"},
            "sharegpt",
            [{"role": "system", "content": "S"}, *TALK],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "1?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "One"},
                ],
                "tools": '[{"name": "add"}]',
            },
            "sharegpt",
            Conversation(
                [
                    {"role": "user", "content": "1?"},
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "content": "1"},
                    {"role": "assistant", "content": "One"},
                ],
                [{"name": "add"}],
            ),
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}]},
            "messages",
            [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"} | CALL]}],
        ),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}], "system": "S"},
            "messages",
            Conversation([{"role": "system", "content": "S"}, *TALK, *TALK], None, (1, 3, 4)),
        ),
        (
            {"instruction": "Why?", "input": "", "output": "So.", "system": "S", "history": [["a", "b"]]},
            "alpaca",
            Conversation(
                [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    *TALK,
                ],
                is_pair=True,
            ),
        ),
        (
            {"instruction": "Add", "context": "1 2", "response": "3"},
            "pairs",
            [{"role": "user", "content": "Add\n1 2"}, {"role": "assistant", "content": "3"}],
        ),
        ({"context": "1 2", "question": "Sum?", "answer": "3"}, "pairs",
         [{"role": "user", "content": "Sum?\n1 2"}, {"role": "assistant", "content": "3"}]),
        ({"prompt": "Add", "query": "1 2", "response": "3"}, "pairs",
         [{"role": "user", "content": "Add\n1 2"}, {"role": "assistant", "content": "3"}]),
        ({"system_prompt": "S", "question": "Why?", "response": "So."}, "pairs",
         [{"role": "system", "content": "S"}, *TALK]),
        ({"prompt": "1, 2,", "completion": " 3"}, "prompt_completion", Text((("1, 2,", False), (" 3", True)))),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_completion",
         Conversation(TALK, None, (1,), is_completion=True)),
        ({"text": "Once", "url": "x"}, "text", Text((("Once", True),))),
        ({"content": "Once"}, "text", Text((("Once", True),))),
    ],
)  # fmt: skip
def test_a_format_is_found_and_read(row: dict[str, Any], kind: str, expected: Any) -> None:
    assert format_of(row) == kind
    found = read(row)
    assert (found.messages if isinstance(expected, list) and isinstance(found, Conversation) else found) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "hi"}, "expected an object with"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "turn 1 has role 'usr'.*did you mean 'user'"),
        ({"messages": [{"role": 3, "content": "x"}]}, "turn 1 has a int as role"),
        ({"messages": ["x"]}, "turn 1 is a str"),
        ({"messages": [USER, {"content": "x"}]}, r"turn 2 has no role \(keys 'content'\)"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "turn 1 has a part of type 'image_url'"),
        ({"messages": [ASSISTANT | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "not JSON"),
        ({"messages": [ASSISTANT | {"tool_calls": {"a": 1}}]}, "turn 1 has a dict as tool_calls"),
        ({"messages": [ASSISTANT | {"weight": 0.5}]}, "turn 1 has weight 0.5"),
        ({"messages": TALK, "tools": "{"}, "tools is not JSON"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}]}, "turn 2 is the second"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "system", "value": "b"}]}, "turn 2 is a system"),
        ({"instruction": "", "output": "b"}, "instruction is empty"),
        ({"instruction": "a", "output": None}, "output is a NoneType"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "history holds a round"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "one of prompt and completion"),
        ({"text": ["a"]}, "text is a list"),
        ({"mesages": TALK}, "The column 'mesages' looks like 'messages'"),
        ({"Instruction": "a", "Output": "b"}, "The column 'Instruction' looks like 'instruction'"),
        ({"chosen": "a", "rejected": "b"}, "looks like a preference pair"),
        ({"role": "user", "content": "b"}, "looks like a single turn"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_in_its_own_words(row: dict[str, Any], reason: str) -> None:
    def attempt() -> None:
        check_format(row, format_of(row))
        read(row)

    with pytest.raises(BadRow, match=reason):
        attempt()


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"id": "a7", "context": "1 2", "question": "Sum?", "answer": "3", "history": [["a", "b"]], "n": 3}, ["id"]),
        ({"instruction": "a", "input": "b", "output": "c", "response": "d", "note": " "}, ["response"]),
        ({"prompt": "a", "completion": "b", "context": "c"}, ["context"]),
        ({"messages": TALK, "system": "S", "title": "t"}, ["title"]),
        ({"text": "a", "url": "u"}, ["url"]),
        ({"input_ids": [1], "source": "x"}, []),
    ],
)
def test_columns_with_text_that_are_not_used_are_named(row: dict[str, Any], unused: list[str]) -> None:
    kind = format_of(row)
    assert kind is not None
    assert unused_columns(row, kind) == unused


@pytest.mark.parametrize("adds_bos", [False, True])
def test_texts_are_tokenised_as_they_stand_and_end_once(adds_bos: bool) -> None:
    tokenizer = make_tokenizer(None, adds_bos=adds_bos)
    encode = RowEncoder(lambda: tokenizer, None, len(tokenizer))
    bos, eos = [tokenizer.bos_token_id] * adds_bos, tokenizer.eos_token_id
    whole = encode(Text((("Hello there, how", True),)))
    plain = tokenizer("Hello there, how", add_special_tokens=False)["input_ids"]
    assert whole.input_ids.tolist() == [*bos, *plain, eos]
    assert whole.labels.tolist() == [*[-100] * adds_bos, *plain, eos]
    assert encode(Text((("Hello there, how</s>", True),))).input_ids.tolist() == [*bos, *plain, eos]
    parts = encode(Text((("Hello there,", False), (" how", True))))
    assert parts.input_ids.tolist() == whole.input_ids.tolist()
    learned = parts.labels != -100
    assert tokenizer.decode(parts.input_ids[learned]) == " how</s>"
    assert not learned[: len(bos) + 1].any()


def test_turns_that_are_given_are_not_learned() -> None:
    tokenizer = make_tokenizer()
    encode = RowEncoder(lambda: tokenizer, None, len(tokenizer))
    tokens = encode(Conversation([*TALK, USER, ASSISTANT | {"content": "Fine."}], learned=(3,)))
    assert tokenizer.decode(tokens.input_ids[tokens.labels != -100]) == "Fine.<|im_end|>\n"
