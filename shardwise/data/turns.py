"""Where the turns of a conversation stand in what a chat template has written.

Found by rendering prefixes of the conversation, so that templates need no marks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jinja2

from shardwise.data.format import BadRow

# What a template raises by itself or by a conversation that it was not written for, and a tokenizer on broken text.
REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end)
Render = Callable[[list[Message], bool], str]  # (messages, add_generation_prompt) -> text
_STAND_INS = ("\u2021", "\u2020")  # for the words of a turn


class TurnNotFoundError(BadRow):
    """A turn of the assistant cannot be told from what stands around it."""


def supervised_spans(
    messages: list[Message], text: str, render: Render, loss: str, learned: Collection[int] | None = None
) -> list[Span]:
    """The parts of ``text``, the rendering of all ``messages``, that are learned, in their order.

    Args:
        loss: ``assistant``: what the assistant says, each turn with its end; ``last_turn``: the last of these;
            ``all_turns``: what everybody says, without what the template writes before a turn; ``text``: everything.
        learned: the places of the turns that the row says are learned (None: all); ``text`` does not look at it.

    Raises:
        BadRow: turns that cannot be found in ``text``.
    """
    turns = assistant_turns(messages)
    if loss in ("text", "last_turn"):
        for k in turns:
            if messages[k].get("tool_calls"):  # templates without tools leave calls out without a word
                assistant_span(messages, k, text, render)
    if loss == "text":
        return [(0, len(text))]
    if loss == "all_turns":
        return _every_turn(messages, text, render, set(range(len(messages)) if learned is None else learned))
    chosen = chosen_turns(messages, loss, learned)
    spans = [assistant_span(messages, k, text, render) for k in chosen]
    for k, (_, end), (start, _) in zip(chosen, spans, spans[1:], strict=False):
        if end > start:
            raise not_found(k)
    return spans


def assistant_turns(messages: list[Message]) -> list[int]:
    """The places of the assistant's turns."""
    return [k for k, message in enumerate(messages) if message["role"] == "assistant"]


def chosen_turns(messages: list[Message], loss: str, learned: Collection[int] | None) -> list[int]:
    """The places of the turns that are learned with the loss ``assistant`` or ``last_turn``."""
    turns = assistant_turns(messages)
    return [k for k in (turns[-1:] if loss == "last_turn" else turns) if learned is None or k in learned]


def assistant_span(messages: list[Message], k: int, text: str, render: Render) -> Span:
    """The turn ``k`` of the assistant: from behind the generation prompt to its end as the template writes it.

    Raises:
        BadRow: the template writes the beginning of this conversation otherwise when more turns follow, or leaves
            out what the assistant says.
    """
    message, content = messages[k], words_of(messages[k])
    start = start_of(messages[:k], content, text, render)
    end = None if start is None else _end(messages[: k + 1], content, text, start, render)
    if start is None or end is None or end <= start:
        raise not_found(k)
    # Its last line, since a template may set a thought before the answer apart.
    said = [content.splitlines()[-1]] if content else []
    for words in [*said, *(call["function"]["name"] for call in message.get("tool_calls") or ())]:
        if words not in text[start:end]:
            what = "text" if words in said else f"call of {words}"
            raise BadRow(f"the chat template leaves out the {what} of turn {k + 1} (it may want a list of parts)")
    return start, end


def not_found(k: int) -> TurnNotFoundError:
    """What is said of turn ``k``, counted from 0, that stands nowhere in what the template has written."""
    rule = "the chat template writes it otherwise when the conversation goes on; give another chat_template"
    return TurnNotFoundError(
        f"turn {k + 1} (assistant) cannot be found: {rule}, tokenise the rows yourself, or use data.loss=last_turn"
    )


def words_of(message: Message) -> str:
    """What is said in a turn, without space around it; beside calls of tools there may be no words."""
    return (message.get("content") or "").strip()


def start_of(before: list[Message], content: str, text: str, render: Render) -> int | None:
    """Where the answer to ``before`` starts in ``text``: behind the generation prompt.

    Some generation prompts begin a thought that a finished turn does not have: then it starts where the two part, or
    with its content where that happens to begin alike.
    """
    if not before:
        return _start_of_first(content, text, render)
    prompt = render(before, True)
    if text.startswith(prompt):
        return len(prompt)
    plain = render(before, False)
    if not text.startswith(plain):
        return None
    parting = len(_whole_marks(text[: _shared(prompt, text)]))
    place = text.rfind(content, len(plain), parting + len(content))
    return place if 0 <= place <= parting < place + len(content) else parting


def _start_of_first(content: str, text: str, render: Render) -> int | None:
    """Where a conversation's own first turn starts if it is an answer: the prompt for it is that behind a question."""
    question = [{"role": "user", "content": _STAND_INS[0]}]
    asked, prompt = render(question, False), render(question, True)
    place = text.find(prompt[len(asked) :]) if prompt.startswith(asked) and len(prompt) > len(asked) else -1
    start = place + len(prompt) - len(asked)
    return start if place >= 0 and text.find(content, start) >= 0 else None


def _end(turns: list[Message], content: str, text: str, start: int, render: Render) -> int | None:
    """End of the last of ``turns``, which starts at ``start``."""
    until = render(turns, False)
    if text.startswith(until):
        return len(until)
    # The template decorates a turn (with an empty thought, say) only while it is the last one. What it writes behind
    # the words, whatever they are, is the end of the turn, and may be that of the conversation, too: as much of it as
    # follows them in the text.
    other = next(mark for mark in _STAND_INS if not content.endswith(mark))
    altered = render([*turns[:-1], {"role": "assistant", "content": other}], False)
    tail = until[len(until) - _shared(until[::-1], altered[::-1]) :]
    if turns[-1].get("tool_calls"):
        place = text.find(tail, text.find(content, start) + len(content))
        return place + len(tail) if place >= 0 and tail.strip() else None
    # A template may strip the words, or leave out the thought before them in turns that are not the last.
    for words in dict.fromkeys((turns[-1]["content"], content, content.rpartition("</think>")[2].strip())):
        place = text.find(words, start) if words else -1
        while place >= 0:
            end = place + len(words)
            following = _whole_marks(tail[: _shared(tail, text[end : end + len(tail)])])
            if following.strip() or not tail.strip():
                return end + len(following)
            place = text.find(words, place + 1)
    return None


def _whole_marks(text: str) -> str:
    """``text`` without a mark that begins in it and does not end: ``<|end|>\n<`` is ``<|end|>\n``."""
    return text[: text.rfind("<")] if text.rfind("<") > text.rfind(">") else text


def _shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _every_turn(messages: list[Message], text: str, render: Render, wanted: Collection[int]) -> list[Span]:
    spans: list[Span] = []
    before = 0
    for k, message in enumerate(messages):
        content = words_of(message)
        if message["role"] == "assistant":
            start, end = assistant_span(messages, k, text, render)
        elif content:
            start = place_of_words(messages[: k + 1], content, text, before, render)
            if start < 0:
                raise BadRow(f"the chat template leaves out the text of turn {k + 1}, or writes it elsewhere")
            end = start + len(content)
            end += _length_of_end(messages[: k + 1], content, text, end, render)
        else:
            continue
        before = end
        if k in wanted:
            spans.append((start, end))
    return spans


def place_of_words(turns: list[Message], content: str, text: str, before: int, render: Render) -> int:
    """Where the words of the last of ``turns`` stand in ``text``, behind ``before``; negative: nowhere.

    Other words in their place show where it is: short ones may stand in what the template writes, too.
    """
    other = next(mark for mark in _STAND_INS if not content.startswith(mark))
    try:
        place = _shared(render([*turns[:-1], turns[-1] | {"content": other}], False), text)
    except REFUSALS:
        place = -1
    if place >= before and text.startswith(content, place):
        return place
    return text.find(content, max(before, place))


def _length_of_end(turns: Sequence[Message], content: str, text: str, end: int, render: Render) -> int:
    """Characters that end the last of ``turns``, whose words stand before ``end`` in ``text``.

    0 where the template does not write it alone.
    """
    try:
        written = render(list(turns), False)
    except REFUSALS:
        return 0
    if written.startswith(text[:end]):  # words such as "|" may stand in what ends them, too
        return len(written) - end if text.startswith(written) else 0
    _, found, tail = written.rpartition(content)
    return len(tail) if found and text.startswith(tail, end) else 0
