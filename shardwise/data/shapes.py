"""Where the turns of a conversation stand, found once for all conversations of one shape.

Most templates write, around the words of conversations with the same roles, always the same text. It is found with
words that stand in, by the way of ``turns``; a conversation of that shape then needs to be rendered once, since its
rendering shows whether it is that text around its own words. If so, its turns stand where those of the stand-ins do.

What a template does may also depend on what is said. Then either its rendering differs, or the words hold something
that the template looks for: such conversations go the long way. So what comes out is a function of the template and
of the conversation alone, whichever others were seen before. A template that only copies words (see ``copying``) is not
asked at all: its text is the shape around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, get_args

from jinja2 import nodes

from shardwise.data.copying import parsed
from shardwise.data.format import BadRow
from shardwise.data.turns import REFUSALS, Message, Render, Span, assistant_turns, chosen_turns, supervised_spans

# With space around, so that it shows whether a template strips; no template looks for them.
_STAND_INS = (" qz{}\u2021 ", " \u2021 jv{}, and\nanother. \u2021 ")
_STRIPS = ("strip", "lstrip", "rstrip", "trim")
_KEYS = ("role", "content")  # of every turn; what asks for them looks at the turn and not at its words
_Written = nodes.AssignBlock | nodes.CallBlock  # what is written in them may be compared with elsewhere
_Held = nodes.Assign | nodes.For | nodes.Keyword | nodes.Macro | _Written  # texts that may be compared with elsewhere
_Looked = nodes.Compare | nodes.Call | nodes.Filter | nodes.Test | _Held


class Place(NamedTuple):
    """So many characters into the text number ``number`` around the words; or, ``in_words``, behind the white space
    that the words which follow that text begin with."""

    number: int
    characters: int
    in_words: bool = False


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
        found = self.write(words)
        return found[1] if found is not None and found[0] == text else None

    def write(self, words: Sequence[str]) -> tuple[str, list[Span]] | None:
        """The text of these words in this shape, and the spans of what is learned; None where they do not show it.

        It is what the template writes if that only copies words: see :func:`shardwise.data.copying.only_copies`.
        """
        written = [one.strip() if strips else one for one, strips in zip(words, self.strips, strict=True)]
        if any(said[:1] == part for said, part in zip(written, self.parts, strict=True)):
            return None  # the prompt may part from these words further on
        pieces = [part for pair in zip(self.around, written, strict=False) for part in pair]
        starts, place = [], 0
        for around, said in zip(self.around, [*written, ""], strict=True):
            starts.append(place)
            place += len(around) + len(said)

        def at(found: Place) -> int:
            start = starts[found.number] + found.characters
            if not found.in_words:
                return start
            said = written[found.number]
            return start + len(said) - len(said.lstrip())

        return "".join([*pieces, self.around[-1]]), [(at(start), at(end)) for start, end in self.spans]


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
    indents = [0 if strips_one else len(one) - len(one.lstrip()) for one, strips_one in zip(said, strips, strict=True)]
    places = [tuple(_place(place, around, borders, indents) for place in span) for span in spans]
    found = [(start, stop) for start, stop in places if start is not None and stop is not None]
    return Shape(tuple(around), tuple(strips), parts, tuple(found)) if len(found) == len(places) else None


def _parts(prompt: str, text: str) -> str:
    """The character at which ``prompt`` parts from ``text``; empty where that begins with all of it."""
    parted = (one for one, other in zip(prompt, text, strict=False) if one != other)
    return next(parted, prompt[len(text) : len(text) + 1])


def _place(position: int, around: Sequence[str], borders: Sequence[int], indents: Sequence[int]) -> Place | None:
    """Which of the texts around a position lies in; None inside of words, unless only white space is before it.

    ``indents``: the white space that the words behind each text begin with, in characters.
    """
    for number, (text, border) in enumerate(zip(around, borders, strict=True)):
        if border <= position <= border + len(text):
            return Place(number, position - border)
        if number < len(indents) and position == border + len(text) + indents[number]:
            return Place(number, len(text), in_words=True)
    return None


class Watch:
    """What a template looks for in the words of a conversation.

    Args:
        template: its text.
    """

    def __init__(self, template: str) -> None:
        self._same: set[str] = set()  # as all of the words
        self._inside: set[str] = set()  # within them
        tree = parsed(template)
        if tree is None:  # everything may be looked for
            self._pattern: re.Pattern[str] | None = re.compile("")
            return
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for node in tree.find_all(get_args(_Looked)):
            exact = isinstance(node, nodes.Compare) and not _is_part(node)
            (self._same if exact else self._inside).update(_texts(node))
            self._inside.update(_texts_of_macros(node, macros))
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._inside)))) if self._inside else None

    def sees(self, words: Sequence[str]) -> bool:
        """Whether the template may treat these words in a way of their own."""
        if any(one.strip() in self._same for one in words):
            return True
        return self._pattern is not None and any(self._pattern.search(one) for one in words)


def _is_part(node: nodes.Compare) -> bool:
    """Whether a comparison looks at a part of something: a slice or a letter, or ``in`` unless that asks for one of
    several."""
    inside = (found for found in node.ops if found.op in ("in", "notin"))
    if any(not isinstance(found.expr, nodes.List | nodes.Tuple) for found in inside):
        return True
    items = list(node.find_all(nodes.Getitem))
    names: list[nodes.Getitem | nodes.Getattr] = [*items, *node.find_all(nodes.Getattr)]
    # ``messages[0]['role']`` asks for one of several, ``content[0]`` for a letter.
    owners = {id(found.node) for found in names if _is_name(found)}
    return any(not _is_name(found) and id(found) not in owners for found in items) or any(
        found.name in ("first", "last") and id(found) not in owners for found in node.find_all(nodes.Filter)
    )


def _is_name(node: nodes.Getitem | nodes.Getattr) -> bool:
    """Whether a part is asked for by its name."""
    if isinstance(node, nodes.Getattr):
        return True
    return isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)


def _texts(node: _Looked) -> Iterator[str]:
    """Texts that a node of a template compares with, splits at, replaces or names.

    What is stripped shows in what is written, and so is no reason.
    """
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _STRIPS:
        return
    if isinstance(node, _Written):
        yield from filter(None, (text.strip() for text in _written(node.body)))
        return
    if isinstance(node, _Held):
        found = [one for held in _held(node) for one in _constants(held)]
    elif isinstance(node, nodes.Compare):
        found = list(node.find_all(nodes.Const))
    else:
        found = [argument for argument in node.args if isinstance(argument, nodes.Const)]
    texts = (one.value for one in found if isinstance(one.value, str) and one.value not in _KEYS)
    # An empty text is in all words. White space that a template splits at or replaces shows in what it writes.
    yield from (text for text in texts if text.strip() or (text and isinstance(node, nodes.Compare)))


def _texts_of_macros(node: _Looked, macros: Mapping[str, nodes.Macro]) -> Iterator[str]:
    """Texts of the macros that ``node`` calls for what they write, and does not write itself."""
    if not isinstance(node, nodes.Compare | nodes.Call | nodes.Test | nodes.Assign | nodes.Keyword):
        return
    called = node.find_all(nodes.Call) if not isinstance(node, nodes.Call) else _within(node.args, nodes.Call)
    for call in called:
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            yield from filter(None, (text.strip() for text in _written(macros[call.node.name].body)))


def _written(body: Sequence[nodes.Node]) -> Iterator[str]:
    """Texts that statements write, as they stand or from an expression."""
    for output in _within(body, nodes.Output):
        for part in output.nodes:
            if isinstance(part, nodes.TemplateData):
                yield part.data
            else:
                yield from (one.value for one in _constants(part) if isinstance(one.value, str))


_N = TypeVar("_N", bound=nodes.Node)


def _within(found: Sequence[nodes.Node], kind: type[_N]) -> Iterator[_N]:
    """Nodes of a kind among ``found`` and below them."""
    for node in found:
        if isinstance(node, kind):
            yield node
        yield from node.find_all(kind)


def _held(node: nodes.Assign | nodes.For | nodes.Keyword | nodes.Macro) -> list[nodes.Node]:
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
