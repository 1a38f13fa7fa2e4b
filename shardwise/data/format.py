"""Which format a row has, found by looking at it, and the reading of rows that are token ids already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardwise.config import nearest

IGNORED = -100  # a label with this value is not supervised
Format = Literal["tokens", "messages", "pairs"]
FORMATS: tuple[Format, ...] = ("tokens", "messages", "pairs")
# Columns of a question and its answer; the first pair that a row has counts.
PAIR_KEYS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
_KEYS: dict[Format, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",),),
    "messages": (("messages",),),
    "pairs": PAIR_KEYS,
}

_TOKEN_KEYS = ("input_ids", "labels", "position_ids", "attention_mask")

# What rows of other tools look like: the keys that give them away, and their name.
_FOREIGN = (
    ({"conversations"}, "a ShareGPT conversation"),
    ({"chosen", "rejected"}, "a preference pair"),
    ({"text"}, "plain text for pretraining"),
)


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason, without file and line."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row's ids and unshifted labels, int32 [length], and its own position ids where it has them.

    ``head`` counts the first tokens that a row keeps when it is cut to length (its beginning-of-sequence token).
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None
    head: int = 0


def format_of(value: Any) -> Format | None:
    """The format of one parsed row, None if it is none that can be read."""
    if isinstance(value, dict):
        for name in FORMATS:
            if _has(value, name):
                return name
    return None


def _has(value: dict[str, Any], name: Format) -> bool:
    return any(set(keys) <= value.keys() for keys in _KEYS[name])


def check_format(value: Any, expected: Format | None) -> None:
    """Raise :class:`BadRow`, saying what the row looks like, unless it has the ``expected`` format."""
    if expected is not None and isinstance(value, dict) and _has(value, expected):
        return
    wanted = " or ".join(_wanted(name) for name in ([expected] if expected else FORMATS))
    raise BadRow(f"{_looks_like(value)}; expected an object with {wanted}")


def _wanted(name: Format) -> str:
    if name == "pairs":
        return "two texts (" + ", ".join("/".join(keys) for keys in PAIR_KEYS) + ")"
    return f'"{_KEYS[name][0][0]}"'


def _looks_like(value: Any) -> str:
    if isinstance(value, list):
        ids = bool(value) and all(type(item) is int for item in value)
        return "a bare list" + (" of token ids" if ids else "")
    if not isinstance(value, dict):
        return f"a bare {type(value).__name__}"
    found = format_of(value)
    if found:
        return f"a row of format {found}"
    for keys, name in _FOREIGN:
        if keys <= value.keys():
            return f"looks like {name} (keys {_listed(value)})"
    return f"an object with keys {_listed(value)}" if value else "an empty object"


def _listed(value: dict[str, Any]) -> str:
    shown = [repr(key) for key in list(value)[:5]]
    return ", ".join(shown) + (", ..." if len(value) > 5 else "")


def read_tokens(value: dict[str, Any], vocab_size: int, max_positions: int | None) -> Tokens:
    """Ids, labels (missing: the ids) and position ids of a tokenised row.

    Raises:
        BadRow: a wrong type or length, an id outside ``[0, vocab_size)``, a label that is neither an id nor -100, a
            position outside ``[0, max_positions)``, or an attention mask with zeros (the row holds padding).
    """
    for key in value:
        near = nearest(key, _TOKEN_KEYS) if isinstance(key, str) and key not in _TOKEN_KEYS else None
        if near is not None and near not in value:  # a misspelt labels would silently supervise every token
            raise BadRow(f"has the key {key!r}; did you mean {near!r}?")
    ids = _integers("input_ids", value["input_ids"])
    if not len(ids):
        raise BadRow("input_ids is empty")
    check_ids(ids, vocab_size)
    labels = ids
    if value.get("labels") is not None:
        labels = _integers("labels", value["labels"], len(ids))
        check_ids(labels[labels != IGNORED], vocab_size, f"label (an id, or {IGNORED} for not supervised)")
    if (
        value.get("attention_mask") is not None
        and not _integers("attention_mask", value["attention_mask"], len(ids)).all()
    ):
        raise BadRow("attention_mask has zeros: the row holds padding; store it without (rows are padded here)")
    positions = None
    if value.get("position_ids") is not None:
        positions = _integers("position_ids", value["position_ids"], len(ids))
        _check_range("position", positions, max_positions, "the model's positions")
        positions = positions.astype(np.int32)
    return Tokens(ids.astype(np.int32), labels.astype(np.int32), positions)


def check_ids(ids: np.ndarray, vocab_size: int, name: str = "id") -> None:
    """Raise :class:`BadRow` at the first id outside ``[0, vocab_size)``."""
    _check_range(name, ids, vocab_size, "the model's vocabulary")


def _check_range(name: str, values: np.ndarray, size: int | None, what: str) -> None:
    top = np.iinfo(np.int32).max if size is None else size
    if len(values) and (values.min() < 0 or values.max() >= top):
        wrong = values[(values < 0) | (values >= top)][0]
        raise BadRow(f"{name} {wrong} is outside {what} [0, {top})")


def _integers(name: str, values: Any, length: int | None = None) -> np.ndarray:
    """``values`` as int64 [length]; bool and float are refused, which numpy would quietly convert."""
    if not isinstance(values, list):
        raise BadRow(f"{name} is a {type(values).__name__}, expected a list of integers")
    kinds = set(map(type, values)) - {int}
    if kinds:
        raise BadRow(f"{name} holds a {kinds.pop().__name__}, expected integers")
    if length is not None and len(values) != length:
        raise BadRow(f"{name} has {len(values)} values for {length} input_ids")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise BadRow(f"{name} holds a number beyond 64 bits") from None
