"""Turns of the assistant whose end stands otherwise in the middle of a conversation than behind its last turn.

Two habits of templates. One writes nothing behind an answer: what ends it is the mark that begins the next turn, at
which a server stops (GLM-4). The other ends an answer with one mark while it is the last, and with another once the
conversation goes on (gpt-oss: ``<|return|>`` and ``<|end|>``): a server stops at the first alone, so it is the first
that is to be learned, in the place of the second.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from shardwise.data.turns import (
    Message,
    Render,
    Span,
    TurnNotFoundError,
    assistant_span,
    not_found,
    place_of_words,
    start_of,
    words_of,
)

_MARK = re.compile(r"<[^<>\s]+>")
_LAST_MARK = re.compile(r"(<[^<>\s]+>)\s*$")


def mark_at(text: str, place: int) -> str | None:
    """The mark that begins at ``place``, None where none does."""
    found = _MARK.match(text, place)
    return None if found is None else found[0]


def spans_with_other_ends(
    messages: list[Message], text: str, render: Render, chosen: Sequence[int]
) -> tuple[list[Span], dict[int, str]]:
    """The spans of the turns ``chosen`` in ``text``, and by the place of a mark the one that is learned instead of it.

    Raises:
        BadRow: a turn that cannot be found in this way either.
    """
    spans, instead = list[Span](), dict[int, str]()
    for k in chosen:
        try:
            spans.append(assistant_span(messages, k, text, render))
        except TurnNotFoundError:
            start, place, end, mark = _other_end(messages, k, text, render)
            spans.append((start, end))
            instead[place] = mark
        if len(spans) > 1 and spans[-1][0] < spans[-2][1]:
            raise not_found(k) from None
    return spans, instead


def _other_end(messages: list[Message], k: int, text: str, render: Render) -> tuple[int, int, int, str]:
    """``(start, place of the mark behind the words, its end, the mark that a last turn has there)``."""
    words = words_of(messages[k])
    start = start_of(messages[:k], words, text, render)
    written = _LAST_MARK.search(render(messages[: k + 1], False))
    # Short words may stand in the header of the turn, too.
    said = place_of_words(messages[: k + 1], words, text, start, render) if start is not None and words else -1
    place = said + len(words)
    follows = _MARK.match(text, place) if said >= 0 else None
    if start is None or written is None or follows is None or messages[k].get("tool_calls"):
        raise not_found(k)
    return start, place, follows.end(), written[1]


def with_next_mark(text: str, spans: Sequence[Span], turns: Sequence[Message], special: Collection[str]) -> list[Span]:
    """``spans`` of the assistant's turns, each without an end of its own up to the end of the mark that follows it.

    Args:
        turns: of each span the turn.
        special: tokens of the tokenizer that no text holds.
    """
    found = []
    for (start, end), turn in zip(spans, turns, strict=True):
        mark = _MARK.match(text, end)
        ended = _LAST_MARK.search(text, start, end)
        goes_on = mark is not None and mark[0] in special and not (ended and ended[1] in special)
        if not turn.get("tool_calls"):  # an end may be no token; behind calls it cannot be told from them
            goes_on = goes_on and text[start:end].rstrip().endswith(words_of(turn).splitlines()[-1])
        found.append((start, mark.end() if mark is not None and goes_on else end))
    return found
