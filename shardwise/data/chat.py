"""Conversations to token ids, through the model's own chat template, with the loss on what the assistant says.

The template is rendered for the whole conversation and, for one of a shape that is not known yet (see ``shapes``), for
its prefixes. A turn of the assistant is supervised from the end of the generation prompt (what a server would feed the
model) to the end of the turn as the template writes it, its end-of-turn token included. The whole text is tokenised
once; the offsets of its tokens say which of them lie in a supervised span, so no token id depends on where a turn ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from shardwise.data.borders import TextTokenizer
from shardwise.data.copying import only_copies
from shardwise.data.ends import mark_at, spans_with_other_ends, with_next_mark
from shardwise.data.format import IGNORED, BadRow, Tokens
from shardwise.data.messages import check_messages, forms, is_bare
from shardwise.data.shapes import Shape, Watch, find_shape
from shardwise.data.turns import (
    REFUSALS,
    Message,
    Span,
    TurnNotFoundError,
    chosen_turns,
    supervised_spans,
    words_of,
)
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import leading_bos
from shardwise.spec.template import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # around what the assistant says, in templates that tell it
_MAX_SHAPES = 4096  # that are kept at once
# For models without a template: ChatML, where the tokenizer has its marks; else a text before each turn, and the
# end-of-sequence token behind it.
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BY_END = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """What a template has written, and where what is learned stands in it.

    ``instead``: by the place of a mark in the text the one that is learned instead of it.
    """

    text: str
    spans: list[Span]
    instead: dict[int, str] = field(default_factory=dict)


class ChatEncoder:
    """Turns a ``messages`` row into :class:`Tokens` with one tokenizer and one template.

    Args:
        tokenizer: a Hugging Face tokenizer that gives character offsets.
        template: a file or the text of a template; None takes the tokenizer's own.
        loss: what is supervised: see :func:`shardwise.data.turns.supervised_spans`.

    Attributes:
        default_template: the template that stands in where none is given and the tokenizer has none; else None.

    Raises:
        ConfigError: a template that is not valid, none and a tokenizer to which none can be given, or a tokenizer
            without offsets.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, loss: str = "assistant"
    ) -> None:
        name = type(tokenizer).__name__
        if not tokenizer.is_fast:
            rule = "messages need a tokenizer that gives character offsets (a fast one)"
            raise ConfigError(f"tokenizer = {name}", rule, 'Tokenise the rows yourself: {"input_ids", "labels"}')
        self._tokenizer, self._loss = tokenizer, loss
        self.default_template = None if template is not None or tokenizer.chat_template else default_template(tokenizer)
        self._template = template_text(template) if template is not None else self.default_template
        self._check_syntax()
        self._bos, self._bos_id, self._eos = leading_bos(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token
        self._texts = TextTokenizer(tokenizer)
        self._needs_answer = loss in ("assistant", "last_turn")
        self._watch: Watch | None = None
        self._shapes: dict[tuple[tuple[str, ...], tuple[int, ...] | None], Shape | None] = {}

    def __call__(self, value: dict[str, Any]) -> Tokens:
        """Ids and labels of one row.

        Raises:
            BadRow: messages that are malformed, that the template refuses, or whose turns cannot be told apart in
                what the template writes.
        """
        return self._tokens(self._rendered(value, None))

    def many(self, values: Sequence[dict[str, Any]]) -> list[Tokens | BadRow]:
        """Ids and labels of rows in their order, rendered and tokenised together; of one that is bad the reason."""
        copied = [self._copied(value) for value in values]
        texts = self._written([value for value, one in zip(values, copied, strict=True) if one is None])
        found = [one or self._tried(value, texts.get(id(value))) for value, one in zip(values, copied, strict=True)]
        written = [one for one in found if isinstance(one, _Rendered)]
        try:
            tokens = iter(self._tokenise(written))
        except REFUSALS:  # of one of them: each by itself, to find out which
            return [self._alone(one) for one in found]
        return [next(tokens) if isinstance(one, _Rendered) else one for one in found]

    def _copied(self, value: dict[str, Any]) -> _Rendered | None:
        """What the template writes of a row, known without asking it; None where it has to be asked."""
        messages = value["messages"]
        if self._loss == "text" or _extras(value) or not is_bare(messages) or not self._only_copies:
            return None
        learned = None if value.get("learned") is None else tuple(value["learned"])
        shape = self._shape(messages, learned)
        found = None if shape is None else shape.write([message["content"] for message in messages])
        return None if found is None else self._with_ends(*found, messages, learned, {})

    @cached_property
    def _only_copies(self) -> bool:
        return only_copies(self._own_template({}))

    def _written(self, values: Sequence[dict[str, Any]]) -> dict[int, str]:
        """What the template writes, by the identity of a row, for rows of words alone; none where it refuses one."""
        from transformers.utils.chat_template_utils import render_jinja_template

        bare = [value for value in values if not _extras(value) and is_bare(value["messages"])]
        if not bare:
            return {}
        talks = [value["messages"] for value in bare]
        try:
            # What apply_chat_template calls, without its search for objects in messages, which costs as much again.
            written, _ = render_jinja_template(
                talks, chat_template=self._own_template({}), **self._tokenizer.special_tokens_map
            )
        except REFUSALS:
            return {}
        return {id(value): str(text) for value, text in zip(bare, written, strict=True)}

    def _tried(self, value: dict[str, Any], text: str | None) -> _Rendered | Tokens | BadRow:
        try:
            return self._rendered(value, text)
        except BadRow as error:
            return error

    def _alone(self, found: _Rendered | Tokens | BadRow) -> Tokens | BadRow:
        try:
            return found if isinstance(found, BadRow) else self._tokens(found)
        except BadRow as error:
            return error

    def _tokens(self, found: _Rendered | Tokens) -> Tokens:
        try:
            tokens = found if isinstance(found, Tokens) else self._tokenise([found])[0]
        except REFUSALS as error:
            raise BadRow(f"the chat template or the tokenizer refuses it: {error}") from None
        if isinstance(tokens, BadRow):
            raise tokens
        return tokens

    def _rendered(self, value: dict[str, Any], text: str | None) -> _Rendered | Tokens:
        """What the template writes of a row; ``text`` is that of its messages as they are, where it is known."""
        check_messages(value["messages"], needs_answer=self._needs_answer)
        learned = None if value.get("learned") is None else tuple(value["learned"])
        refusal: BadRow | None = None
        for messages in forms(value["messages"]):
            try:
                return self._encode(messages, _extras(value), learned, text)
            except BadRow as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _encode(
        self, messages: list[Message], extras: dict[str, Any], learned: tuple[int, ...] | None, text: str | None
    ) -> _Rendered | Tokens:
        # Of the conversation's own beginnings: rendering is half of the work.
        known: dict[tuple[int, bool], str] = {} if text is None else {(len(messages), False): text}

        def render(part: list[Message], add_generation_prompt: bool) -> str:
            if part and part[-1] is not messages[len(part) - 1]:
                return self._render(part, extras, add_generation_prompt)
            place = len(part), add_generation_prompt
            if place not in known:
                known[place] = self._render(part, extras, add_generation_prompt)
            return known[place]

        try:
            text = render(messages, False)
            spans = None if extras else self._known_spans(messages, text, learned)
            instead: dict[int, str] = {}
            if spans is None:
                try:
                    spans = supervised_spans(messages, text, render, self._loss, learned)
                except TurnNotFoundError:
                    if self._loss != "assistant":
                        raise
                    if learned is None and _MARKED.search(self._own_template(extras)):
                        return self._by_marks(messages, extras)
                    chosen = chosen_turns(messages, self._loss, learned)
                    spans, instead = spans_with_other_ends(messages, text, render, chosen)
            return self._with_ends(text, spans, messages, learned, instead)
        except BadRow:
            raise
        except REFUSALS as error:
            raise BadRow(f"the chat template or the tokenizer refuses it: {error}") from None

    def _known_spans(self, messages: list[Message], text: str, learned: tuple[int, ...] | None) -> list[Span] | None:
        """The spans by the shape of a conversation, None where that does not say."""
        if self._loss == "text" or not is_bare(messages):
            return None
        words = [message["content"] for message in messages]
        if self._watch is None:
            self._watch = Watch(self._own_template({}))
        if self._watch.sees(words):
            return None
        shape = self._shape(messages, learned)
        return None if shape is None else shape.find(words, text)

    def _shape(self, messages: list[Message], learned: tuple[int, ...] | None) -> Shape | None:
        """The shape of a conversation of words alone; None where its roles have none, or are to be refused."""
        key = tuple(message["role"] for message in messages), learned
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = None
            with suppress(BadRow):
                check_messages(messages, needs_answer=self._needs_answer)
                self._shapes[key] = find_shape(key[0], self._render_bare, self._loss, learned)
        return self._shapes[key]

    def _render_bare(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self._render(messages, {}, add_generation_prompt)

    def _check_syntax(self) -> None:
        try:
            self._render([{"role": "user", "content": "x"}], {}, True)
        except jinja2.TemplateSyntaxError as error:
            rule = f"not a valid template (its line {error.lineno}: {error.message})"
            raise ConfigError("chat_template", rule, "Correct it") from None
        except REFUSALS:
            pass  # valid, and wants another conversation than this one

    def _own_template(self, extras: dict[str, Any]) -> str:
        return self._template or str(self._tokenizer.get_chat_template(tools=extras.get("tools")))

    def _render(self, messages: list[Message], extras: dict[str, Any], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **extras,
        )
        return str(text)

    def _with_ends(
        self,
        text: str,
        spans: list[Span],
        messages: list[Message],
        learned: tuple[int, ...] | None,
        instead: dict[int, str],
    ) -> _Rendered:
        """``text`` with an end for every turn, also where the template writes none."""
        if self._needs_answer:
            turns = [messages[k] for k in chosen_turns(messages, self._loss, learned)]
            spans = with_next_mark(text, spans, turns, self._special)
        end = self._missing_end(text, messages[-1])
        if end:
            spans = [(start, stop + len(end) if stop == len(text) else stop) for start, stop in spans]
        return _Rendered(text + end, spans, instead)

    @cached_property
    def _special(self) -> frozenset[str]:
        """Tokens that stand for themselves, and in no text."""
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _vocab(self) -> dict[str, int]:
        """The tokenizer's vocabulary, which it makes anew whenever it is asked."""
        return self._tokenizer.get_vocab()

    def _missing_end(self, text: str, last: Message) -> str:
        """The end-of-sequence token where the template writes nothing behind the last answer; else nothing.

        Without one the model would not learn to stop.
        """
        eos, words, written = self._eos, words_of(last), text.rstrip()
        is_missing = last["role"] == "assistant" and words and written.endswith(words) and eos is not None
        return str(eos) if is_missing and not written.endswith(str(eos)) else ""

    def _by_marks(self, messages: list[Message], extras: dict[str, Any]) -> Tokens:
        """By the template's own marks, where it writes earlier turns otherwise than the last one."""
        encoded: Any = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **extras,
        )
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        return self._with_bos(ids, np.where(np.array(encoded["assistant_masks"]) == 1, ids, IGNORED))

    def _tokenise(self, found: Sequence[_Rendered]) -> list[Tokens | BadRow]:
        places = [[*(place for span in one.spans for place in span), *one.instead] for one in found]
        cut = self._texts.cut([one.text for one in found], places)
        return [self._labelled(ids, borders, one) for (ids, borders), one in zip(cut, found, strict=True)]

    def _labelled(self, ids: np.ndarray, borders: list[int], found: _Rendered) -> Tokens | BadRow:
        """``borders``: how many tokens end by the places of the spans, and then by those of the marks."""
        # By a token's last character: one that a merge has drawn over the border holds the answer's first one.
        labels = np.full_like(ids, IGNORED)
        num_spans = len(found.spans)
        for first, behind in zip(borders[: 2 * num_spans : 2], borders[1 : 2 * num_spans : 2], strict=True):
            labels[first:behind] = ids[first:behind]
        for (place, mark), at in zip(found.instead.items(), borders[2 * num_spans :], strict=True):
            # Only a mark that is one token can take the place of one.
            if mark not in self._vocab or not self._is_token(found.text, place, int(ids[at])):
                return BadRow(f"the end {mark} of a turn is no token of its own; use data.loss=last_turn")
            labels[at] = self._vocab[mark]
        return self._with_bos(ids, labels)

    def _is_token(self, text: str, place: int, token: int) -> bool:
        """Whether the mark that stands at ``place`` is this one token."""
        written = mark_at(text, place)
        return written is not None and self._vocab.get(written) == token

    def _with_bos(self, ids: np.ndarray, labels: np.ndarray) -> Tokens:
        if self._bos and ids[:1].tolist() != self._bos:
            ids = np.concatenate([self._bos, ids])
            labels = np.concatenate([[IGNORED], labels])
        head = int(len(ids) > 0 and int(ids[0]) == self._bos_id)
        return Tokens(ids.astype(np.int32, copy=False), labels.astype(np.int32, copy=False), head=head)


def _extras(value: dict[str, Any]) -> dict[str, Any]:
    """What a template is given beside the turns of a row."""
    settings: dict[str, Any] = value.get("settings") or {}
    return settings | {"tools": value["tools"]} if value.get("tools") else settings


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """A template of the tokenizer's own tokens, for a model that has none.

    Raises:
        ConfigError: it has neither ChatML's marks nor an end-of-sequence token: nothing could end a turn.
    """
    if all(mark in tokenizer.get_vocab() for mark in _CHATML_MARKS):
        return _CHATML
    if tokenizer.eos_token is not None:
        return _BY_END
    rule = "the data has messages, and the tokenizer has neither a chat template nor a token that could end a turn"
    raise ConfigError("chat_template", rule, "Give one with chat_template=FILE, or tokenise the rows yourself")
