"""Which format a row has, found by looking at its columns, and what to say of a row that has none."""

from __future__ import annotations

from typing import Any, get_args

from shardwise.config import nearest
from shardwise.data.format import BadRow, Format

# In the order in which they are looked for: a row that has the columns of several has the first.
FORMATS: tuple[Format, ...] = (
    *("tokens", "messages", "sharegpt", "segments", "alpaca", "prompt_completion", "pairs", "text"),
)
assert set(FORMATS) == set(get_args(Format)) - {"auto"}

CONVERSATIONS = ("messages", "conversations", "conversation", "dialogue", "dialog")  # columns of turns
TEXTS = ("text", "content", "document")  # columns of a text to learn as a whole
# Columns of a question and its answer; the first pair that a row has counts.
PAIR_KEYS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("question", "response"),
    ("question", "answer"),
    ("query", "answer"),
    ("instruction", "answer"),
    ("user", "assistant"),
)
_KNOWN = sorted({"input_ids", "segments", *CONVERSATIONS, *TEXTS, *(key for keys in PAIR_KEYS for key in keys)})
_WANTED: dict[Format, str] = {
    "tokens": '"input_ids"',
    "messages": '"messages" (turns of role and content)',
    "sharegpt": '"conversations" (turns of from and value)',
    "segments": '"segments" (pieces of text and label)',
    "alpaca": '"instruction" and "output"',
    "prompt_completion": '"prompt" and "completion"',
    "pairs": "two texts (" + ", ".join("/".join(keys) for keys in PAIR_KEYS) + ")",
    "text": '"text"',
}
# What rows of other tasks look like: the keys that give them away, and their name.
_FOREIGN = (
    ({"chosen", "rejected"}, "a preference pair"),
    ({"role", "content"}, "a single turn"),
)
_RATED = ({"prompt", "completion"}, {"prompt", "response"})  # beside a label, as preference data has them
_RATINGS = ("true", "false", "0", "1", "0.0", "1.0")  # of a label, also in the cells of a table


def format_of(value: Any) -> Format | None:
    """The format of one parsed row, None if it is none that can be read."""
    if not isinstance(value, dict):
        return None
    return next((name for name in FORMATS if has_format(value, name)), None)


def has_format(value: dict[str, Any], name: Format) -> bool:
    """Whether a row has the columns of a format; what stands in them is looked at when they are read."""
    match name:
        case "tokens":
            return "input_ids" in value
        case "messages" | "sharegpt":
            turns = turns_column(value)
            return (
                turns is not None
                and not _is_rated(value)
                and (has_no_turns(value) or _is_sharegpt(value[turns]) == (name == "sharegpt"))
            )
        case "segments":
            return _has_segments(value)
        case "alpaca":
            return {"instruction", "output"} <= value.keys() and not _is_rated(value)
        case "prompt_completion":
            return {"prompt", "completion"} <= value.keys() and not _is_rated(value)
        case "pairs":
            return pair_columns(value) is not None and not _is_rated(value)
        case _:
            return text_column(value) is not None


def turns_column(value: dict[str, Any]) -> str | None:
    """The column that holds a row's turns; a text of that name is none."""
    found = (name for name in CONVERSATIONS if name in value and not isinstance(value[name], str))
    return next(found, None)


def has_no_turns(value: dict[str, Any]) -> bool:
    """Whether a row's column of turns is empty, so that it may be of either format of turns."""
    turns = turns_column(value)
    return turns is not None and not value[turns]


def pair_columns(value: dict[str, Any]) -> tuple[str, str] | None:
    """The columns of a row's question and answer."""
    return next((keys for keys in PAIR_KEYS if set(keys) <= value.keys()), None)


def text_column(value: dict[str, Any]) -> str | None:
    """The column of a text to learn as a whole; turns and pairs are none, whatever else they hold."""
    found = next((name for name in TEXTS if name in value), None)
    if found is None or len(value) == 1:
        return found
    if turns_column(value) or pair_columns(value) or any(keys <= value.keys() for keys, _ in _FOREIGN):
        return None
    return found


def _is_sharegpt(turns: Any) -> bool:
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and "role" not in first and ("from" in first or "value" in first)


def _has_segments(value: dict[str, Any]) -> bool:
    """Whether a row is made of pieces: beside a text, pieces without a label are those of a transcript, say."""
    pieces = value.get("segments")
    if not isinstance(pieces, list):
        return False
    return text_column(value) is None or (bool(pieces) and isinstance(pieces[0], dict) and "label" in pieces[0])


def _is_rated(value: dict[str, Any]) -> bool:
    """Whether a row says if its completion is a good one: a bad one is not to be learned."""
    if value.get("kto_tag") is not None:
        return True
    label = value.get("label")
    if not isinstance(label, bool | int | float | str) or str(label).strip().lower() not in _RATINGS:
        return False
    return any(keys <= value.keys() for keys in _RATED)


def check_format(value: Any, expected: Format | None) -> None:
    """Raise :class:`BadRow`, saying what the row looks like, unless it has the ``expected`` format."""
    if expected is not None and isinstance(value, dict) and has_format(value, expected):
        return
    wanted = " or ".join(_WANTED[name] for name in ([expected] if expected else FORMATS))
    raise BadRow(f"{looks_like(value)}; expected an object with {wanted}{_near_column(value, expected)}")


def looks_like(value: Any) -> str:
    """What a value of a data file is, in words."""
    if isinstance(value, list):
        ids = bool(value) and all(type(item) is int for item in value)
        return "a bare list" + (" of token ids" if ids else "")
    if not isinstance(value, dict):
        return f"a bare {type(value).__name__}"
    if _is_rated(value):
        return f"looks like a completion with a rating (keys {_listed(value)})"
    for keys, name in _FOREIGN:
        if keys <= value.keys():
            return f"looks like {name} (keys {_listed(value)})"
    text = next((name for name in CONVERSATIONS if isinstance(value.get(name), str)), None)
    if text is not None:
        return f"its {text} is a text that is no JSON (keys {_listed(value)})"
    found = format_of(value)
    if found == "text":
        return f"looks like plain text for pretraining (keys {_listed(value)})"
    if found == "sharegpt":
        return f"looks like a ShareGPT conversation (keys {_listed(value)})"
    if found:
        return f"a row of format {found}"
    return f"an object with keys {_listed(value)}" if value else "an empty object"


def _near_column(value: Any, expected: Format | None) -> str:
    """The known column that one of the row's was most likely meant to be."""
    if not isinstance(value, dict) or (expected is None and format_of(value)):
        return ""
    for key in value:
        if isinstance(key, str) and key not in _KNOWN:
            near = nearest(key.strip().lower(), _KNOWN, cutoff=0.75)
            if near is not None and near not in value:
                return f". The column {key!r} looks like {near!r}"
    return ""


def _listed(value: dict[str, Any]) -> str:
    shown = [repr(key) for key in list(value)[:5]]
    return ", ".join(shown) + (", ..." if len(value) > 5 else "")
