"""What a conversation must be like to be learned from, and the forms that templates may want it in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardwise.data.format import BadRow
from shardwise.data.turns import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


def is_bare(messages: Any) -> bool:
    """Whether turns hold words and nothing else, and each of them some; there is at least one."""
    if type(messages) is not list or not messages:
        return False
    for turn in messages:
        if type(turn) is not dict or len(turn) != 2 or type(turn.get("role")) is not str:
            return False
        content = turn.get("content")
        if type(content) is not str or not content or content.isspace():
            return False
    return True


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """``messages`` as templates may want them: calls beside an empty text or none, arguments as object or text.

    Without calls there is one form. The first that a template takes, and leaves nothing out of, counts.
    """
    if not any(turn.get("tool_calls") for turn in messages):
        yield messages
        return
    for as_text in (False, True):
        for empty in ("", None):
            yield [_form(turn, empty, as_text) if turn.get("tool_calls") else turn for turn in messages]


def _form(turn: Message, empty: str | None, as_text: bool) -> Message:
    calls = turn["tool_calls"]
    if as_text:
        functions = [call["function"] for call in calls]
        texts = [json.dumps(function.get("arguments") or {}, ensure_ascii=False) for function in functions]
        calls = [
            call | {"function": function | {"arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ]
    return turn | {"content": turn.get("content") or empty, "tool_calls": calls}


def check_messages(messages: Any, *, needs_answer: bool = True) -> None:
    """Raise :class:`BadRow`, with the turn counted from 1, unless this is a conversation to learn from.

    Args:
        needs_answer: whether only the assistant's words are learned, so that there must be some, at the end.
    """
    if not isinstance(messages, list):
        raise BadRow(f"messages is a {type(messages).__name__}, expected a list")
    if not messages:
        raise BadRow("the conversation is empty")
    for turn, message in enumerate(messages, start=1):
        _check_message(f"turn {turn}", message)
    roles = [message["role"] for message in messages]
    if not needs_answer:
        return
    if "assistant" not in roles:
        raise BadRow("no turn of the assistant")
    if roles[-1] != "assistant":
        raise BadRow(f"the conversation ends with a turn of role {roles[-1]}, nobody answers it")


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadRow(f"{name} is a {type(message).__name__}, expected an object with role and content")
    if "role" not in message:
        foreign = " (looks like ShareGPT's from and value)" if "from" in message else ""
        raise BadRow(f"{name} has no role{foreign}")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise BadRow(f"{name} has role {role!r}; roles are {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if content is None and calls:
        return
    if content is None:
        raise BadRow(f"{name} ({role}) has no content")
    if not isinstance(content, str):
        raise BadRow(f"{name} ({role}) has a {type(content).__name__} as content, expected text")
    if not content.strip() and role not in ("system", "tool") and not calls:
        raise BadRow(f"{name} ({role}) has empty content")
