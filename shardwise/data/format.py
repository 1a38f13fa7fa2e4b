"""The inner form of rows, one for all formats, and the reading of rows that are token ids already.

Whatever a file holds becomes one of three things: :class:`Conversation` (turns, for a chat template), :class:`Text`
(pieces as they stand) or :class:`Tokens`. ``detect`` says which format a row has, ``convert`` makes the inner form of
it, ``encode`` the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.config import nearest
from shardwise.spec.run import DataFormat

IGNORED = -100  # a label with this value is not supervised
Format = DataFormat

_MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # 1 where a token is learned
_TOKEN_KEYS = ("input_ids", "labels", "position_ids", "attention_mask", *_MASKS)


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


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row of turns.

    Attributes:
        messages: turns as chat templates take them: ``role`` (system, developer, user, assistant, tool), ``content``
            (text, or None beside ``tool_calls``), and what else the row gave, with the arguments of tool calls as
            objects.
        tools: descriptions of the tools, None where the row has none.
        learned: the places in ``messages`` that may be supervised; None: all that the loss is taken on.
        is_pair: a question and its answer in two columns; without a chat template it is plain text.
        is_completion: a prompt and its completion; ``learned`` are the turns of the completion.
        unflagged: of a completion, what ``learned`` is where every turn is learned, those of the prompt too; None: all.
        settings: what the row gives to the chat template beside its turns and tools.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    learned: tuple[int, ...] | None = None
    is_pair: bool = False
    is_completion: bool = False
    unflagged: tuple[int, ...] | None = None
    settings: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A row of text without turns: ``(text, whether it is supervised)`` pieces, in order, taken as they stand.

    The tokenizer's end-of-sequence token follows and is supervised where the last piece is.
    """

    pieces: tuple[tuple[str, bool], ...]


Sample = Tokens | Conversation | Text


def read_tokens(value: dict[str, Any], vocab_size: int, max_positions: int | None) -> Tokens:
    """Ids, labels (missing: the ids) and position ids of a tokenised row. What a mask has 0 for is not learned.

    Raises:
        BadRow: a wrong type or length, an id outside ``[0, vocab_size)``, a label that is neither an id nor -100, a
            position outside ``[0, max_positions)``, an attention mask with zeros (the row holds padding), or a mask
            of what is learned with something else than 0 and 1.
    """
    _check_keys(value)
    ids = _integers("input_ids", value["input_ids"])
    if not len(ids):
        raise BadRow("input_ids is empty")
    check_ids(ids, vocab_size)
    labels = ids
    if value.get("labels") is not None:
        labels = _integers("labels", value["labels"], len(ids))
        check_ids(labels[labels != IGNORED], vocab_size, f"label (an id, or {IGNORED} for not supervised)")
    for key in _MASKS:
        if value.get(key) is not None:
            labels = np.where(_mask(key, value[key], len(ids)), labels, IGNORED)
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


def _check_keys(value: dict[str, Any]) -> None:
    """Refuse a key that was meant to say what is learned: ignored it would silently supervise every token."""
    absent = [key for key in _TOKEN_KEYS if key not in value]
    for key in value:
        if not isinstance(key, str) or key in _TOKEN_KEYS or key == "special_tokens_mask":  # of a tokenizer
            continue
        near = nearest(key, absent)
        if "mask" in key and near != "attention_mask":  # which of them is 1 where, only its author knows
            raise BadRow(f"has the key {key!r}; masks are {', '.join(_MASKS)}, with 1 for what is learned")
        if near is not None:
            raise BadRow(f"has the key {key!r}; did you mean {near!r}?")


def _mask(name: str, values: Any, length: int) -> np.ndarray:
    """``values`` as bool [length]."""
    plain = [int(one) if isinstance(one, bool) else one for one in values] if isinstance(values, list) else values
    found = _integers(name, plain, length)
    if len(found) and not np.isin(found, (0, 1)).all():
        raise BadRow(f"{name} holds {found[(found != 0) & (found != 1)][0]}, expected 0 and 1")
    return found == 1


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
