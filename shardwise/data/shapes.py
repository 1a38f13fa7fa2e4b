"""Where the turns of a conversation stand, found once for all conversations of one shape.

Most templates write, around the words of conversations with the same roles, always the same text. It is found with
words that stand in, by the way of ``turns``; a conversation of that shape then needs to be rendered once, since its
rendering shows whether it is that text around its own words. If so, its turns stand where those of the stand-ins do.

What a template does may also depend on what is said. Then either its rendering differs, or the words hold something
that the template looks for: such conversations go the long way. So what comes out is a function of the template and
of the conversation alone, whichever others were seen before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import jinja2
from jinja2 import nodes

from shardwise.data.format import BadRow
from shardwise.data.turns import REFUSALS, Message, Render, Span, assistant_turns, chosen_turns, supervised_spans

# With space around, so that it shows whether a template strips; no template looks for them.
_STAND_INS = (" qz{}\u2021 ", " \u2021 jv{}, and\nanother. \u2021 ")
_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # of transformers' own, which jinja2 does not know
_STRIPS = ("strip", "lstrip", "rstrip", "trim")
_KEYS = ("role", "content")  # of every turn; what asks for them looks at the turn and not at its words
_Held = nodes.Assign | nodes.For | nodes.Keyword | nodes.Macro  # texts that may be compared with elsewhere
_Looked = nodes.Compare | nodes.Call | nodes.Filter | nodes.Test | _Held
Place = tuple[int, int]  # number of a text around the words, and characters into it


@dataclass(frozen=True)
class Shape:
    """What a template writes ``around`` the words of n turns: n + 1 texts, before, between and behind them.

    Attributes:
        strips: of each turn whether its words are stripped.
        parts: of each turn the character at which its generation prompt parts from what is written; empty where it
            does not.
        spans: where what is learned begins and ends.
    """

    around: tuple[str, ...]
    strips: tuple[bool, ...]
    parts: tuple[str, ...]
    spans: tuple[tuple[Place, Place], ...]

    def find(self, words: Sequence[str], text: str) -> list[Span] | None:
        """The spans of what is learned in ``text``; None unless it is these words in this shape."""
        written = [one.strip() if strips else one for one, strips in zip(words, self.strips, strict=True)]
        pieces = [part for pair in zip(self.around, written, strict=False) for part in pair]
        if "".join([*pieces, self.around[-1]]) != text:
            return None
        if any(said[:1] == part for said, part in zip(written, self.parts, strict=True)):
            return None  # the prompt may part from these words further on
        starts, place = [], 0
        for around, said in zip(self.around, [*written, ""], strict=True):
            starts.append(place)
            place += len(around) + len(said)
        return [(starts[a] + b, starts[c] + d) for (a, b), (c, d) in self.spans]


def find_shape(roles: Sequence[str], render: Render, loss: str, learned: Sequence[int] | None) -> Shape | None:
    """The shape of conversations with these roles; None where the template does more than copy their words.

    Args:
        loss, learned: as of :func:`shardwise.data.turns.supervised_spans`.
    """
    one, other = (_shape_of(roles, words, render, loss, learned) for words in _STAND_INS)
    return one if one == other else None


def _shape_of(
    roles: Sequence[str], words: str, render: Render, loss: str, learned: Sequence[int] | None
) -> Shape | None:
    said = [words.format(number) for number in range(len(roles))]
    messages: list[Message] = [{"role": role, "content": one} for role, one in zip(roles, said, strict=True)]
    try:
        text = render(messages, False)
        spans = supervised_spans(messages, text, render, loss, learned)
        answers = assistant_turns(messages) if loss == "all_turns" else chosen_turns(messages, loss, learned)
        parts = tuple(_parts(render(messages[:k], True), text) if k in answers else "" for k in range(len(said)))
    except (BadRow, *REFUSALS):
        return None
    around, strips, borders, end = list[str](), list[bool](), list[int](), 0
    for one in said:
        written = one if one in text else one.strip()
        start = text.find(written, end)
        if start < 0 or text.count(written) != 1:
            return None
        around.append(text[end:start])
        borders.append(end)
        strips.append(written != one)
        end = start + len(written)
    around.append(text[end:])
    borders.append(end)
    places = [(_place(start, around, borders), _place(stop, around, borders)) for start, stop in spans]
    found = [(start, stop) for start, stop in places if start is not None and stop is not None]
    return Shape(tuple(around), tuple(strips), parts, tuple(found)) if len(found) == len(places) else None


def _parts(prompt: str, text: str) -> str:
    """The character at which ``prompt`` parts from ``text``; empty where that begins with all of it."""
    parted = (one for one, other in zip(prompt, text, strict=False) if one != other)
    return next(parted, prompt[len(text) : len(text) + 1])


def _place(position: int, around: Sequence[str], borders: Sequence[int]) -> Place | None:
    """Which of the texts around a position lies in; None inside of words."""
    for number, (text, border) in enumerate(zip(around, borders, strict=True)):
        if border <= position <= border + len(text):
            return number, position - border
    return None


class Watch:
    """What a template looks for in the words of a conversation.

    Args:
        template: its text.
    """

    def __init__(self, template: str) -> None:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        self._same: set[str] = set()  # as all of the words
        self._inside: set[str] = set()  # within them
        try:
            found = environment.parse(_TAGS.sub("", template)).find_all(get_args(_Looked))
        except jinja2.TemplateSyntaxError:  # tags that are not known here: everything may be looked for
            self._pattern: re.Pattern[str] | None = re.compile("")
            return
        for node in found:
            exact = isinstance(node, nodes.Compare) and not _is_part(node)
            (self._same if exact else self._inside).update(_texts(node))
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._inside)))) if self._inside else None

    def sees(self, words: Sequence[str]) -> bool:
        """Whether the template may treat these words in a way of their own."""
        if any(one.strip() in self._same for one in words):
            return True
        return self._pattern is not None and any(self._pattern.search(one) for one in words)


def _is_part(node: nodes.Compare) -> bool:
    """Whether a comparison looks at a part of something: a slice, or ``in`` unless that asks for one of several."""
    inside = (found for found in node.ops if found.op in ("in", "notin"))
    return any(not isinstance(found.expr, nodes.List | nodes.Tuple) for found in inside) or bool(node.find(nodes.Slice))


def _texts(node: _Looked) -> Iterator[str]:
    """Texts that a node of a template compares with, splits at, replaces or names; those of white space are left out.

    Stripping shows in what is written, and so is no reason.
    """
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _STRIPS:
        return
    if isinstance(node, _Held):
        found = [one for held in _held(node) for one in _constants(held)]
    elif isinstance(node, nodes.Compare):
        found = list(node.find_all(nodes.Const))
    else:
        found = [argument for argument in node.args if isinstance(argument, nodes.Const)]
    texts = (one.value for one in found if isinstance(one.value, str))
    yield from (text for text in texts if text.strip() and text not in _KEYS)


def _held(node: _Held) -> list[nodes.Node]:
    """What a node gives a name to: its values, not what stands below it."""
    if isinstance(node, nodes.Macro):
        return list(node.defaults)
    if isinstance(node, nodes.Keyword):
        return [node.value]
    return [node.iter if isinstance(node, nodes.For) else node.node]


def _constants(node: nodes.Node) -> list[nodes.Const]:
    """Constants of an expression, but the names of parts (``x['name']``) and what is stripped."""
    if isinstance(node, nodes.Const):
        return [node]
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return _constants(node.node)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _STRIPS:
        return _constants(node.node.node)
    return [one for child in node.iter_child_nodes() for one in _constants(child)]
