"""From a row as its file has it to the inner form: the spellings of other tools become one."""

from __future__ import annotations

import json
from typing import Any

from shardwise.config import nearest
from shardwise.data.detect import pair_columns, text_column, turns_column
from shardwise.data.format import BadRow, Conversation, Format, Sample, Text, read_tokens

Message = dict[str, Any]

# Names that speakers have elsewhere; those of chat templates stand for themselves.
_SPEAKERS = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool"), None),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function", "ipython"), "tool"),
}
_SYSTEM_COLUMNS = ("system", "system_prompt")
_CONTEXT_COLUMNS = ("input", "context")  # what a question is about


def read_row(value: dict[str, Any], kind: Format, vocab_size: int, max_positions: int | None) -> Sample:
    """The inner form of a row of the format ``kind``, which it has the columns of.

    Raises:
        BadRow: what stands in the columns cannot be used.
    """
    match kind:
        case "tokens":
            return read_tokens(value, vocab_size, max_positions)
        case "messages" | "sharegpt":
            return read_turns(value)
        case "prompt_completion":
            return read_completion(value)
        case "text":
            column = text_column(value)
            assert column is not None
            return Text(((_text(value, column), True),))
        case _:
            return read_pair(value, _pair(value, kind))


def read_turns(value: dict[str, Any]) -> Conversation:
    """Turns of ``role`` and ``content``, or of ``from`` and ``value``, with the row's system text and tools.

    Raises:
        BadRow: a turn that is malformed; turns of ``from`` and ``value`` that do not alternate.
    """
    column = turns_column(value)
    assert column is not None
    turns = value[column]
    if not isinstance(turns, list):
        raise BadRow(f"{column} is a {type(turns).__name__}, expected a list")
    messages = [_turn(f"turn {number}", turn) for number, turn in enumerate(turns, start=1)]
    if any(isinstance(turn, dict) and "role" not in turn for turn in turns):
        _check_alternation(messages)
    system = _system(value)
    if system and (not messages or messages[0].get("role") != "system"):
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, _tools(value), _learned(turns, len(messages)))


def _turn(name: str, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f"{name} is a {type(turn).__name__}, expected an object with role and content")
    by_role = "role" in turn
    speaker_key, text_key = ("role", "content") if by_role else ("from", "value")
    if speaker_key not in turn:
        raise BadRow(f"{name} has no role (keys {', '.join(map(repr, list(turn)[:5])) or 'none'})")
    speaker = turn[speaker_key]
    message = {"role": _role(name, speaker), "content": _content(name, turn.get(text_key))}
    more = {key: item for key, item in turn.items() if key not in (speaker_key, text_key, "weight")}
    if speaker == "function_call":
        more["tool_calls"] = _called(name, message["content"])
        message["content"] = ""
    elif more.get("tool_calls") is not None:
        more["tool_calls"] = [_call(name, call) for call in _listed(name, "tool_calls", more["tool_calls"])]
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
    if not isinstance(call, dict):
        raise BadRow(f"{name} has a tool call that is a {type(call).__name__}, expected an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{name} has a tool call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(f"{name}: the arguments of its tool call", arguments or "{}")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else {"type": "function", "function": function}


def _called(name: str, content: Any) -> list[dict[str, Any]]:
    """The calls of a ShareGPT turn of ``function_call``: one object or several, as JSON text."""
    found = _json(f"{name}: its function call", content) if isinstance(content, str) else content
    return [_call(name, call) for call in (found if isinstance(found, list) else [found])]


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f"{name} is not JSON") from None


def _listed(name: str, key: str, value: Any) -> list[Any]:
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


def _learned(turns: list[Any], num_messages: int) -> tuple[int, ...] | None:
    """By ``weight`` 0 a turn is given, and not learned."""
    weights = [turn.get("weight") for turn in turns]
    if all(weight is None for weight in weights):
        return None
    for number, weight in enumerate(weights, start=1):
        if weight not in (None, 0, 1):
            raise BadRow(f"turn {number} has weight {weight!r}; a turn is learned (1) or given (0)")
    added = num_messages - len(turns)  # a system turn from a column of its own
    return tuple(place + added for place, weight in enumerate(weights) if weight != 0)


def _system(value: dict[str, Any]) -> str:
    key = next((key for key in _SYSTEM_COLUMNS if value.get(key)), None)
    return "" if key is None else _text(value, key)


def _tools(value: dict[str, Any]) -> list[Any] | None:
    tools = value.get("tools")
    if isinstance(tools, str):
        tools = _json("tools", tools) if tools.strip() else None
    return None if not tools else _listed("the row", "tools", tools)


def read_completion(value: dict[str, Any]) -> Sample:
    """A prompt that is given and a completion that is learned: both texts as they stand, or both lists of turns.

    Raises:
        BadRow: neither; an empty completion.
    """
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given, learned = ([_turn(f"{key}, turn {n}", turn) for n, turn in enumerate(turns, start=1)]
                          for key, turns in (("prompt", prompt), ("completion", completion)))  # fmt: skip
        if not learned:
            raise BadRow("completion is empty")
        places = tuple(range(len(given), len(given) + len(learned)))
        return Conversation([*given, *learned], _tools(value), places, is_completion=True)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow("one of prompt and completion is a list of turns, and the other is none")
    if not isinstance(prompt, str):  # an empty one is a text to learn as a whole
        raise BadRow(f"prompt is a {type(prompt).__name__}, expected text")
    return Text(((prompt, False), (_text(value, "completion"), True)))


def read_pair(value: dict[str, Any], columns: tuple[str, str] | None) -> Conversation:
    """A question and its answer, with earlier rounds (``history``) and a system text where the row has them.

    A question and what it is about (see :func:`_context`) are joined by a line break.

    Raises:
        BadRow: a column that is no text, or an empty question or answer.
    """
    assert columns is not None
    question, answer = columns
    parts = [_text(value, question, may_be_empty=question == "instruction")]
    parts += [_text(value, key) for key in _context(question, answer) if value.get(key)]
    asked = "\n".join(part for part in parts if part.strip())
    if not asked:
        raise BadRow(f"{question} is empty")
    system = _system(value)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for texts in [*_history(value), (asked, _text(value, answer))]:
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return Conversation(messages, is_pair=True)


def _context(question: str, answer: str) -> list[str]:
    """Columns that belong to the question of a pair: ``input`` and ``context``, and beside a ``prompt`` ``query``."""
    names = (*_CONTEXT_COLUMNS, *(["query"] if question == "prompt" else []))
    return [name for name in names if name not in (question, answer)]


def unused_columns(value: dict[str, Any], kind: Format) -> list[str]:
    """Columns with text that :func:`read_row` does not look at; of rows of token ids none."""
    match kind:
        case "tokens":
            return []
        case "messages" | "sharegpt":
            used = [turns_column(value), *_SYSTEM_COLUMNS, "tools"]
        case "prompt_completion":
            used = ["prompt", "completion", "tools"]
        case "text":
            used = [text_column(value)]
        case _:
            columns = _pair(value, kind)
            assert columns is not None
            used = [*columns, *_context(*columns), *_SYSTEM_COLUMNS, "history"]
    return [key for key, text in value.items() if key not in used and isinstance(text, str) and text.strip()]


def _pair(value: dict[str, Any], kind: Format) -> tuple[str, str] | None:
    return ("instruction", "output") if kind == "alpaca" else pair_columns(value)


def _history(value: dict[str, Any]) -> list[tuple[str, str]]:
    rounds = value.get("history")
    if isinstance(rounds, str) and rounds.strip():
        rounds = _json("history", rounds)
    if not rounds:
        return []
    if not isinstance(rounds, list):
        raise BadRow(f"history is a {type(rounds).__name__}, expected a list of rounds")
    for one in rounds:
        if not (isinstance(one, list | tuple) and len(one) == 2 and all(isinstance(text, str) for text in one)):
            raise BadRow("history holds a round that is no list of a question and its answer")
    return [(one[0], one[1]) for one in rounds]


def _text(value: dict[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise BadRow(f"{key} is a {type(text).__name__}, expected text")
    if not (may_be_empty or text.strip()):
        raise BadRow(f"{key} is empty")
    return text
