"""Rows as other tools write them: found by their columns, and turned into one inner form."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from shardwise.data.columns import renamed
from shardwise.data.convert import read_row, unused_columns
from shardwise.data.detect import check_format, format_of
from shardwise.data.encode import RowEncoder
from shardwise.data.format import BadRow, Conversation, Sample, Text
from shardwise.spec.template import OWN_SETTINGS
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
        ({"messages": '[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]'}, "messages",
         Conversation(TALK)),
        (
            {"messages": [USER, ASSISTANT | {"train": False}, USER, ASSISTANT | {"train": True}]},
            "messages",
            Conversation([*TALK, *TALK], None, (0, 2, 3)),
        ),
        ({"messages": [USER | {"loss": None}, ASSISTANT | {"loss": 1}]}, "messages", Conversation(TALK, None, (0, 1))),
        (
            {"conversations": [{"from": "human", "value": "1?"}, {"from": "tool_call", "value": json.dumps(
                {"name": "add", "arguments": {"a": 1}})}, {"from": "tool_response", "value": "1"}]},
            "sharegpt",
            [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
             {"role": "tool", "content": "1"}],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None,
                                 "function_call": {"name": "add", "arguments": '{"a": 1}'}},
                          {"role": "function", "name": "add", "content": "1"}],
             "functions": [{"name": "add"}]},
            "messages",
            Conversation([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                          {"role": "tool", "content": "1", "name": "add"}],
                         [{"type": "function", "function": {"name": "add"}}]),
        ),
        ({"conversation": [{"system": "S", "input": "Why?", "output": "So."}, {"input": "Why?", "output": "So."}]},
         "messages", [{"role": "system", "content": "S"}, *TALK, *TALK]),
        ({"conversation": [{"human": "Why?", "assistant": "So."}]}, "messages", Conversation(TALK)),
        ({"conversation": [{"input": "Why?", "output": "So.", "output_with_loss": False, "id": 7},
                           {"input": "Why?", "output": "So.", "train": True}]}, "messages",
         Conversation([USER | {"id": 7}, ASSISTANT | {"id": 7}, *TALK], None, (2, 3))),
        ({"prompt": [USER], "completion": [ASSISTANT | {"weight": 0}, USER, ASSISTANT]}, "prompt_completion",
         Conversation([*TALK, *TALK], None, (2, 3), is_completion=True, unflagged=(0, 2, 3))),
        ({"prompt": [USER | {"train": False}], "completion": [ASSISTANT]}, "prompt_completion",
         Conversation(TALK, None, (1,), is_completion=True, unflagged=(1,))),
        ({"text": "Once", "segments": [{"start": 0.0, "text": "Once"}]}, "text", Text((("Once", True),))),
        ({"text": "12", "segments": [{"text": "1", "label": 0}, {"text": "2", "label": 1}]}, "segments",
         Text((("1", False), ("2", True)))),
        ({"prompt": "a", "completion": "b", "label": "greeting"}, "prompt_completion",
         Text((("a", False), ("b", True)))),
        ({"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}, "messages",
         Conversation(TALK, settings={"enable_thinking": False})),
        ({"prompt": [USER], "completion": [ASSISTANT], "chat_template_kwargs": '{"a": 1}'}, "prompt_completion",
         Conversation(TALK, None, (1,), is_completion=True, settings={"a": 1})),
        ({"segments": [{"label": False, "text": "1+1="}, {"label": True, "text": "2"}]}, "segments",
         Text((("1+1=", False), ("2", True)))),
        ({"text": "Once", "url": "x"}, "text", Text((("Once", True),))),
        ({"content": "Once"}, "text", Text((("Once", True),))),
    ],
)  # fmt: skip
def test_a_format_is_found_and_read(row: dict[str, Any], kind: str, expected: Any) -> None:
    value = renamed(row, None)
    assert format_of(value) == kind
    found = read(value)
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
        ({"messages": [ASSISTANT | {"train": "yes"}]}, "turn 1 has train 'yes'"),
        ({"messages": [ASSISTANT | {"train": True, "weight": 0}]}, "turn 1 has weight and train that contradict"),
        ({"messages": [USER, ASSISTANT | {"trainable": False}]}, "turn 2 has 'trainable', .*; weight says whether"),
        ({"messages": [USER, ASSISTANT | {"loss_weight": 0.0}]}, "turn 2 has 'loss_weight'"),
        ({"conversation": [{"input": "a", "output": "b", "mask": True}]}, "turn 1 has 'mask'"),
        ({"conversation": [{"input": "a", "output": "b", "thought": "c"}]}, "a round holds 'thought'"),
        ({"messages": [ASSISTANT | {"train_detail": [{"a": 1}]}]}, "turn 1 has train_detail"),
        ({"messages": TALK, "chat_template_kwargs": [1]}, "chat_template_kwargs is a list"),
        ({"messages": TALK, "chat_template_kwargs": {"tokenize": True}}, "holds 'tokenize'"),
        ({"messages": "[{'role': 'user'}]"}, "its messages is a text that is no JSON .*expected an object with"),
        ({"segments": [{"text": "a"}]}, "segment 1 has label None"),
        ({"segments": [{"label": True}]}, "segment 1 is no object with text"),
        ({"segments": [{"label": True, "text": " "}]}, "segments hold no text"),
        ({"input_ids": [1, 2], "completion_mask": [0, 2]}, "completion_mask holds 2, expected 0 and 1"),
        ({"input_ids": [1, 2], "assistant_masks": [1]}, "assistant_masks has 1 values for 2 input_ids"),
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
        ({"prompt": "a", "completion": "b", "label": False}, "looks like a completion with a rating"),
        ({"prompt": "a", "completion": "b", "label": 0}, "looks like a completion with a rating"),
        ({"prompt": "a", "response": "b", "label": "True"}, "looks like a completion with a rating"),
        ({"instruction": "a", "output": "b", "kto_tag": False}, "looks like a completion with a rating"),
        ({"messages": TALK, "kto_tag": True}, "looks like a completion with a rating"),
        ({"role": "user", "content": "b"}, "looks like a single turn"),
        ({"input_ids": [1, 2], "labels": [1, 2], "label_mask": [0, 1]}, "'label_mask'; masks are completion_mask, "),
        ({"input_ids": [1, 2], "attention_mask": [1, 1], "prompt_mask": [1, 0]}, "'prompt_mask'; masks are"),
        ({"input_ids": [1, 2], "attention_masks": [1, 1]}, "'attention_masks'; did you mean 'attention_mask'"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_in_its_own_words(row: dict[str, Any], reason: str) -> None:
    def attempt() -> None:
        value = renamed(row, None)
        check_format(value, format_of(value))
        read(value)

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


def test_a_turn_of_a_completion_that_is_given_stays_so_where_every_turn_is_learned() -> None:
    tokenizer = make_tokenizer()
    row = read({"prompt": [USER], "completion": [ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"content": "Fine."}]})
    tokens = RowEncoder(lambda: tokenizer, None, len(tokenizer), "all_turns")(row)
    learned = tokenizer.decode(tokens.input_ids[tokens.labels != -100])
    assert learned == "Why?<|im_end|>\nWhy?<|im_end|>\nFine.<|im_end|>\n"


def test_settings_of_a_row_reach_its_template() -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% if calm %}~{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encode = RowEncoder(lambda: tokenizer, None, len(tokenizer))
    plain, calm, again = encode.many(
        [Conversation(TALK), Conversation(TALK, settings={"calm": True}), Conversation(TALK, settings={"calm": False})]
    )
    told = [tokenizer.decode(row.labels[row.labels != -100]) for row in (plain, calm, again)]  # type: ignore[union-attr]
    assert told == ["So.<|im_end|>", "So.<|im_end|>~", "So.<|im_end|>"]
    all_calm = RowEncoder(lambda: tokenizer, None, len(tokenizer), settings={"calm": True})
    rows = all_calm.many([Conversation(TALK), Conversation(TALK, settings={"calm": False})])
    told = [tokenizer.decode(row.labels[row.labels != -100]) for row in rows]  # type: ignore[union-attr]
    assert told == ["So.<|im_end|>~", "So.<|im_end|>"], "those of a run are for all rows, and a row's own come first"


def test_settings_that_are_not_for_a_row_are_all_the_arguments_of_the_call() -> None:
    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert arguments - {"self", "kwargs", "documents"} == set(OWN_SETTINGS) - {"messages"}


def test_pieces_and_completions_are_learned_alike_together_and_alone() -> None:
    tokenizer = make_tokenizer()
    encode = RowEncoder(lambda: tokenizer, None, len(tokenizer))
    rows = [
        Text((("Hello", False), (" there", True))),
        Text((("the sea", True),)),
        Text((("今", True), ("天", False), ("", True), (" fine", True), (" thank you", False))),
    ]
    together = encode.many(rows)
    for row, tokens in zip(rows, together, strict=True):
        alone = encode(row)
        assert not isinstance(tokens, BadRow)
        assert tokens.labels.tolist() == alone.labels.tolist()
        assert tokens.input_ids.tolist() == alone.input_ids.tolist()
    told = [tokenizer.decode(tokens.labels[tokens.labels != -100]) for tokens in together]  # type: ignore[union-attr]
    assert told == [" there</s>", "the sea</s>", "今 fine"]


def test_half_a_character_is_named() -> None:
    tokenizer = make_tokenizer()
    encode = RowEncoder(lambda: tokenizer, None, len(tokenizer))
    whole, text, talk = encode.many(
        [Text((("a", True),)), Text((("a\ud800", True),)), Conversation([USER | {"content": "\udfff"}, ASSISTANT])]
    )
    assert not isinstance(whole, BadRow)
    assert "it holds '\\ud800', one half of a character" in str(text)
    assert "it holds '\\udfff', one half of a character" in str(talk)
