"""The turns of a conversation as files of other tools have them, in the form that chat templates take."""

from __future__ import annotations

import json
import re
from typing import Any

from shardwise.config import nearest
from shardwise.data.format import BadRow

Message = dict[str, Any]

_CALLERS = ("function_call", "tool_call")  # whose words are calls, as JSON
# Names that speakers have elsewhere; those of chat templates stand for themselves.
_SPEAKERS = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool"), None),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", *_CALLERS), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function", "ipython"), "tool"),
}
# Of a round, which is an object with a text for each speaker; in the order in which they speak.
_OF_ROUND = ("system", "user", "human", "input", "assistant", "gpt", "bot", "output")
_ROLE_OF_ROUND = {"input": "user", "output": "assistant"}
_FLAGS = ("weight", "loss", "train", "training", "output_with_loss")  # of a turn, whether it is learned
_LIKE_FLAG = re.compile(r"loss|mask|train|weight|learn|supervis")  # in names of other tools' flags


def read_turns(name: str, turns: Any) -> tuple[list[Message], tuple[int, ...] | None]:
    """Messages of turns, and the places of those that may be learned (None: all).

    Args:
        name: what messages begin with, such as ``turn``.

    Raises:
        BadRow: a turn that is malformed; turns of ``from`` and ``value`` that do not alternate.
    """
    if all(map(_is_plain, turns)):
        return list(turns), None
    whole = [turn for each in turns for turn in _of_round(each)]
    messages = [_turn(f"{name} {number}", turn) for number, turn in enumerate(whole, start=1)]
    if any(isinstance(turn, dict) and "role" not in turn for turn in whole):
        _check_alternation(messages)
    flags = [_flag(f"{name} {number}", turn) for number, turn in enumerate(whole, start=1)]
    if all(flag is None for flag in flags):
        return messages, None
    return messages, tuple(place for place, flag in enumerate(flags) if flag is not False)


def _is_plain(turn: Any) -> bool:
    """Whether a turn has the form of chat templates already, and nothing else: most have."""
    if type(turn) is not dict or len(turn) != 2 or type(turn.get("content")) is not str:
        return False
    role = turn.get("role")
    return type(role) is str and role in _SPEAKERS and _SPEAKERS[role] is None


def _of_round(turn: Any) -> list[Any]:
    """The turns of a round, each with the flags of the round; every other turn by itself.

    Raises:
        BadRow: the round holds something else, which would be lost.
    """
    if not isinstance(turn, dict) or "role" in turn or "from" in turn:
        return [turn]
    found = [(key, turn[key]) for key in _OF_ROUND if isinstance(turn.get(key), str)]
    if len(found) < 2:
        return [turn]
    more = {key: item for key, item in turn.items() if key not in _OF_ROUND}
    unknown = [key for key, item in more.items() if key not in _FLAGS and not isinstance(item, int | float | None)]
    if unknown:
        rule = f"texts of {', '.join(_OF_ROUND)} and flags ({', '.join(_FLAGS)})"
        raise BadRow(f"a round holds {unknown[0]!r}, and rounds hold {rule}; write it as turns of role and content")
    said = [(_ROLE_OF_ROUND.get(key, key), text) for key, text in found if text.strip() or key != "system"]
    return [{"role": role, "content": text} | more for role, text in said]


def _flag(name: str, turn: Message) -> bool | None:
    """Whether a turn says that it is learned; None where it does not say."""
    if len(turn) == 2:  # who and what
        return None
    found = {key: turn[key] for key in _FLAGS if turn.get(key) is not None}
    if turn.get("train_detail"):
        raise BadRow(f"{name} has train_detail; a turn is learned as a whole or not at all (weight)")
    for key in turn:
        if key not in _FLAGS and isinstance(key, str) and _LIKE_FLAG.search(key.lower()) and turn[key] is not None:
            raise BadRow(
                f"{name} has {key!r}, which is not known; weight says whether a turn is learned (1) or given (0)"
            )
    for key, flag in found.items():
        if flag not in (0, 1):
            raise BadRow(f"{name} has {key} {flag!r}; a turn is learned (1) or given (0)")
    if len({bool(flag) for flag in found.values()}) > 1:
        raise BadRow(f"{name} has {' and '.join(found)} that contradict each other")
    return bool(next(iter(found.values()))) if found else None


def _turn(name: str, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f"{name} is a {type(turn).__name__}, expected an object with role and content")
    speaker_key, text_key = ("role", "content") if "role" in turn else ("from", "value")
    if speaker_key not in turn:
        raise BadRow(f"{name} has no role (keys {', '.join(map(repr, list(turn)[:5])) or 'none'})")
    speaker = turn[speaker_key]
    message = {"role": _role(name, speaker), "content": _content(name, turn.get(text_key))}
    more = {key: item for key, item in turn.items() if key not in (speaker_key, text_key, *_FLAGS)}
    called = more.pop("function_call", None)  # of one function, before there were several
    if str(speaker).strip().lower() in _CALLERS:
        called, message["content"] = message["content"], ""
    if called is not None:
        more["tool_calls"] = _called(name, called)
    elif more.get("tool_calls") is not None:
        more["tool_calls"] = [_call(name, call) for call in listed(name, "tool_calls", more["tool_calls"])]
    return message | more


def _role(name: str, speaker: Any) -> str:
    if not isinstance(speaker, str):
        raise BadRow(f"{name} has a {type(speaker).__name__} as role, expected text")
    known = speaker.strip().lower()
    if known not in _SPEAKERS:
        near = nearest(known, _SPEAKERS)
        hint = f"; did you mean {near!r}?" if near else ""
        raise BadRow(f"{name} has role {speaker!r}; roles are {', '.join(_SPEAKERS)}{hint}")
    return _SPEAKERS[known] or known


def _content(name: str, content: Any) -> Any:
    """Text as it is; a list of text parts joined. What is no text is left for the check of the conversation."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRow(f"{name} has a part of type {kind!r}, and only text can be learned")
        parts.append(part["text"])
    return "".join(parts)


def _call(name: str, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates write it as JSON, and would quote a text again."""
    if isinstance(call, str):
        call = parsed(f"{name}: its tool call", call)
    if not isinstance(call, dict):
        raise BadRow(f"{name} has a tool call that is a {type(call).__name__}, expected an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{name} has a tool call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parsed(f"{name}: the arguments of its tool call", arguments or "{}")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else {"type": "function", "function": function}


def _called(name: str, content: Any) -> list[dict[str, Any]]:
    """The calls of a turn that is nothing else: one object or several, also as JSON text."""
    found = parsed(f"{name}: its function call", content) if isinstance(content, str) else content
    return [_call(name, call) for call in (found if isinstance(found, list) else [found])]


def parsed(name: str, text: str) -> Any:
    """What a JSON text holds; ``name`` is its own in messages.

    Raises:
        BadRow: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f"{name} is not JSON") from None


def listed(name: str, key: str, value: Any) -> list[Any]:
    """``value``, which stands under ``key`` and has to be a list.

    Raises:
        BadRow: it is none.
    """
    if not isinstance(value, list):
        raise BadRow(f"{name} has a {type(value).__name__} as {key}, expected a list")
    return value


def _check_alternation(messages: list[Message]) -> None:
    """ShareGPT's turns alternate; two in a row of one speaker are a row that was cut badly."""
    before = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role == "system" and number > 1:
            raise BadRow(f"turn {number} is a system turn inside the conversation")
        if role == before and role in ("user", "assistant"):
            raise BadRow(f"turn {number} is the second turn of the {role} in a row")
        before = role
