"""From a row as its file has it to the inner form: the spellings of other tools become one."""

from __future__ import annotations

from typing import Any

from shardwise.data.detect import pair_columns, text_column, turns_column
from shardwise.data.format import BadRow, Conversation, Format, Sample, Text, read_tokens
from shardwise.data.speakers import Message, listed, parsed, read_turns
from shardwise.spec.template import OWN_SETTINGS

_SYSTEM_COLUMNS = ("system", "system_prompt")
_CONTEXT_COLUMNS = ("input", "context")  # what a question is about
SETTINGS_COLUMN = "chat_template_kwargs"


def read_row(value: dict[str, Any], kind: Format, vocab_size: int, max_positions: int | None) -> Sample:
    """The inner form of a row of the format ``kind``, which it has the columns of.

    Raises:
        BadRow: what stands in the columns cannot be used.
    """
    match kind:
        case "tokens":
            return read_tokens(value, vocab_size, max_positions)
        case "messages" | "sharegpt":
            return read_conversation(value)
        case "segments":
            return read_segments(value)
        case "prompt_completion":
            return read_completion(value)
        case "text":
            column = text_column(value)
            assert column is not None
            return Text(((_text(value, column), True),))
        case _:
            return read_pair(value, _pair(value, kind))


def read_conversation(value: dict[str, Any]) -> Conversation:
    """Turns in any of their spellings, with the row's system text, tools and settings of the template.

    Raises:
        BadRow: what :func:`shardwise.data.speakers.read_turns` says.
    """
    column = turns_column(value)
    assert column is not None
    turns = value[column]
    if not isinstance(turns, list):
        raise BadRow(f"{column} is a {type(turns).__name__}, expected a list")
    messages, learned = read_turns("turn", turns)
    system = _system(value)
    if system and (not messages or messages[0].get("role") != "system"):
        messages.insert(0, {"role": "system", "content": system})
        learned = None if learned is None else tuple(place + 1 for place in learned)
    return Conversation(messages, _tools(value), learned, settings=_settings(value))


def _system(value: dict[str, Any]) -> str:
    key = next((key for key in _SYSTEM_COLUMNS if value.get(key)), None)
    return "" if key is None else _text(value, key)


def _tools(value: dict[str, Any]) -> list[Any] | None:
    key = "functions" if value.get("functions") and not value.get("tools") else "tools"
    tools = value.get(key)
    if isinstance(tools, str):
        tools = parsed(key, tools) if tools.strip() else None
    if not tools:
        return None
    found = listed("the row", key, tools)
    return [{"type": "function", "function": tool} for tool in found] if key == "functions" else found


def _settings(value: dict[str, Any]) -> dict[str, Any] | None:
    """What a row gives to its chat template, such as ``enable_thinking``."""
    settings = value.get(SETTINGS_COLUMN)
    if isinstance(settings, str):
        settings = parsed(SETTINGS_COLUMN, settings) if settings.strip() else None
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise BadRow(f"{SETTINGS_COLUMN} is a {type(settings).__name__}, expected an object")
    wrong = next((key for key in settings if key in OWN_SETTINGS), None)
    if wrong is not None:
        raise BadRow(f"{SETTINGS_COLUMN} holds {wrong!r}, which is not for a row to say")
    return settings


def read_segments(value: dict[str, Any]) -> Text:
    """Pieces of text that follow each other as they stand, each learned or given.

    Raises:
        BadRow: a piece without text, or with a ``label`` that is neither true nor false; none.
    """
    pieces = []
    for number, piece in enumerate(value["segments"], start=1):
        if not isinstance(piece, dict) or not isinstance(piece.get("text"), str):
            raise BadRow(f"segment {number} is no object with text and label")
        if piece.get("label") not in (0, 1):
            raise BadRow(f"segment {number} has label {piece.get('label')!r}, expected true or false")
        pieces.append((piece["text"], bool(piece["label"])))
    if not any(text.strip() for text, _ in pieces):
        raise BadRow("segments hold no text")
    return Text(tuple(pieces))


def read_completion(value: dict[str, Any]) -> Sample:
    """A prompt that is given and a completion that is learned: both texts as they stand, or both lists of turns.

    Raises:
        BadRow: neither; an empty completion.
    """
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given, asked = read_turns("prompt, turn", prompt)
        learned, wanted = read_turns("completion, turn", completion)
        if not learned:
            raise BadRow("completion is empty")
        places = tuple(len(given) + place for place in (range(len(learned)) if wanted is None else wanted))
        is_flagged = not (asked is None and wanted is None)
        every = (*(range(len(given)) if asked is None else asked), *places) if is_flagged else None
        return Conversation(
            [*given, *learned],
            _tools(value),
            places,
            is_completion=True,
            unflagged=every,
            settings=_settings(value),
        )
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
            used = [turns_column(value), *_SYSTEM_COLUMNS, "tools", "functions", SETTINGS_COLUMN]
        case "prompt_completion":
            used = ["prompt", "completion", "tools", "functions", SETTINGS_COLUMN]
        case "segments":
            used = ["segments"]
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
        rounds = parsed("history", rounds)
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
