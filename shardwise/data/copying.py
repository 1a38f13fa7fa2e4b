"""Whether a chat template does no more with the words of a conversation than to copy them, told by its text.

Of such a template what it writes around the words follows from the roles alone, so that a conversation of a known shape
needs no rendering. That is said of conversations in which every turn holds a role, words, and nothing else. A template
of which it cannot be told counts as one that does more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import jinja2
from jinja2 import nodes

GENERATION_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # of transformers' own, which jinja2 does not know
_WORDS = "content"
_MESSAGES = "messages"
_OF_LOOP = ("first", "last", "index", "index0", "revindex", "revindex0", "length")  # of what loop knows, no message

_OF_TEXTS = ("string", "defined", "undefined", "none", "mapping", "number", "iterable", "sequence")  # alike for all


def parsed(template: str) -> nodes.Template | None:
    """The syntax tree of a chat template, None where it has tags that are not known."""
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAGS.sub("", template))
    except jinja2.TemplateSyntaxError:
        return None


def only_copies(template: str) -> bool:
    """Whether the words reach what is written as they are or stripped, and nothing else depends on them."""
    tree = parsed(template)
    if tree is None:
        return False
    asks_the_time = any(name.name == "strftime_now" for name in tree.find_all(nodes.Name))
    return not asks_the_time and all(_Uses(tree).are_harmless())


class _Uses:
    """Every place of a template that has to do with messages, and what becomes of it there."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._parents = {id(child): node for node in _all(tree) for child in node.iter_child_nodes()}
        # Names of lists of messages, of messages, and of texts with words; a name counts in all of the template.
        self._lists, self._singles, self._texts = {_MESSAGES}, set[str](), set[str]()
        before = -1
        while before != (found := len(self._lists) + len(self._singles) + len(self._texts)):
            before = found
            for node in _all(tree):
                if isinstance(node, nodes.For | nodes.Assign) and isinstance(node.target, nodes.Name):
                    self._note(node, node.target.name)

    def _note(self, node: nodes.For | nodes.Assign, name: str) -> None:
        """What a loop or an assignment gives a name to."""
        if isinstance(node, nodes.For):
            if self._is_list(node.iter):
                self._singles.add(name)
        elif self._is_list(node.node):
            self._lists.add(name)
        elif self._is_single(node.node):
            self._singles.add(name)
        elif any(map(self._is_words, _all(node.node))):
            self._texts.add(name)

    def are_harmless(self) -> Iterator[bool]:
        yield not (self._lists & self._singles or self._texts & (self._lists | self._singles))
        for node in _all(self._tree):
            if isinstance(node, nodes.Name) and node.ctx == "load" and node.name == "loop":
                parent = self._parents[id(node)]
                yield isinstance(parent, nodes.Getattr) and parent.attr in _OF_LOOP
            elif self._is_list(node):
                yield self._is_harmless_list(node)
            elif self._is_single(node):
                yield self._is_harmless_single(node)
            elif self._is_words(node):
                yield self._is_copied(node)

    def _is_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.ctx == "load" and node.name in self._lists
        if isinstance(node, nodes.CondExpr):
            return self._is_list(node.expr1) and node.expr2 is not None and self._is_list(node.expr2)
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and self._is_list(node.node)

    def _is_single(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.ctx == "load" and node.name in self._singles
        if isinstance(node, nodes.Filter) and node.name in ("first", "last") and node.node is not None:
            return self._is_list(node.node)
        return isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice) and self._is_list(node.node)

    def _is_words(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.ctx == "load" and node.name in self._texts
        return self._part(node) == _WORDS

    def _part(self, node: nodes.Node) -> str | None:
        """The name of the part of a message that a node is."""
        if isinstance(node, nodes.Getattr) and self._is_single(node.node):
            return node.attr
        if isinstance(node, nodes.Getitem) and self._is_single(node.node) and isinstance(node.arg, nodes.Const):
            return str(node.arg.value)
        return None

    def _is_harmless_list(self, node: nodes.Node) -> bool:
        parent = self._parents[id(node)]
        if isinstance(parent, nodes.Filter):
            return parent.name in ("length", "count", "first", "last")
        if isinstance(parent, nodes.Test):
            return parent.name == "defined"
        if isinstance(parent, nodes.Getitem):
            return parent.node is node
        if isinstance(parent, nodes.CondExpr):
            return parent.test is not node and self._is_list(parent)
        if isinstance(parent, nodes.For):
            return parent.iter is node and isinstance(parent.target, nodes.Name)
        return isinstance(parent, nodes.Assign) and isinstance(parent.target, nodes.Name)

    def _is_harmless_single(self, node: nodes.Node) -> bool:
        parent = self._parents[id(node)]
        part = self._part(parent)
        if part is not None:
            return part not in dir(dict)  # such as items and get, which give words away
        return isinstance(parent, nodes.Assign) and isinstance(parent.target, nodes.Name)

    def _is_copied(self, node: nodes.Node) -> bool:
        """Whether the words are written, joined to other text, given a name, or asked for what is true of all words."""
        child, parent, joined = node, self._parents[id(node)], isinstance(node, nodes.Name)
        while True:
            if isinstance(parent, nodes.Output):
                return self._is_written(parent)
            if isinstance(parent, nodes.Assign):
                return isinstance(parent.target, nodes.Name)
            if isinstance(parent, nodes.If | nodes.CondExpr) and parent.test is child:
                return True  # there are words in every turn
            if isinstance(parent, nodes.Test):
                return parent.node is child and parent.name in _OF_TEXTS
            if isinstance(parent, nodes.Add | nodes.Concat):
                joined = True
            elif isinstance(parent, nodes.CondExpr | nodes.And | nodes.Or | nodes.Not):
                pass  # one of several is chosen
            elif joined or not self._strips(parent, child):
                return False  # what is stripped when it is joined is the text around it, and the words at one end
            child, parent = parent, self._parents[id(parent)]

    def _is_written(self, output: nodes.Node) -> bool:
        """Whether an output goes into the text itself, and not into a name or a macro."""
        while not isinstance(output, nodes.Template):
            output = self._parents[id(output)]
            if not isinstance(output, nodes.If | nodes.For | nodes.Template):
                return False
        return True

    def _strips(self, parent: nodes.Node, child: nodes.Node) -> bool:
        """``words | trim`` or ``words.strip()``, of which the method is met first and then its call."""
        if isinstance(parent, nodes.Filter):
            return parent.name == "trim" and not (parent.args or parent.kwargs)
        if isinstance(parent, nodes.Getattr):
            call = self._parents[id(parent)]
            return parent.attr == "strip" and isinstance(call, nodes.Call) and call.node is parent
        return isinstance(parent, nodes.Call) and parent.node is child and not (parent.args or parent.kwargs)


def _all(tree: nodes.Node) -> Iterator[nodes.Node]:
    yield tree
    yield from tree.find_all(nodes.Node)
