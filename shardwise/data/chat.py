"""Conversations to token ids, through the model's own chat template, with the loss on what the assistant says.

The template is rendered for the whole conversation and for its prefixes. A turn of the assistant is supervised from
the end of the generation prompt (what a server would feed the model) to the end of the turn as the template writes
it, its end-of-turn token included. The whole text is tokenised once; the offsets of its tokens say which of them lie
in a supervised span, so no token id depends on where a turn ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from shardwise.data.format import IGNORED, BadRow, Tokens
from shardwise.data.turns import REFUSALS, Message, Span, TurnNotFoundError, supervised_spans, words_of
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import leading_bos
from shardwise.spec.template import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # around what the assistant says, in templates that tell it
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
        self._bos = leading_bos(tokenizer)

    def __call__(self, value: dict[str, Any]) -> Tokens:
        """Ids and labels of one row.

        Raises:
            BadRow: messages that are malformed, that the template refuses, or whose turns cannot be told apart in
                what the template writes.
        """
        check_messages(value["messages"], needs_answer=self._loss in ("assistant", "last_turn"))
        refusal: BadRow | None = None
        for messages in _forms(value["messages"]):
            try:
                return self._encode(messages, value.get("tools"), value.get("learned"))
            except BadRow as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _encode(self, messages: list[Message], tools: Any, learned: Collection[int] | None) -> Tokens:
        known: dict[tuple[int, bool], str] = {}  # of the conversation's own beginnings: rendering is half of the work

        def render(part: list[Message], add_generation_prompt: bool) -> str:
            if part and part[-1] is not messages[len(part) - 1]:
                return self._render(part, tools, add_generation_prompt)
            place = len(part), add_generation_prompt
            if place not in known:
                known[place] = self._render(part, tools, add_generation_prompt)
            return known[place]

        try:
            text = render(messages, False)
            try:
                spans = supervised_spans(messages, text, render, self._loss, learned)
            except TurnNotFoundError:
                told = self._loss == "assistant" and learned is None
                if not told or not _MARKED.search(self._own_template(tools)):
                    raise
                return self._by_marks(messages, tools)
            end = self._missing_end(text, messages[-1])
            if end:
                spans = [(start, stop + len(end) if stop == len(text) else stop) for start, stop in spans]
            return self._tokenise(text + end, spans)
        except BadRow:
            raise
        except REFUSALS as error:
            raise BadRow(f"the chat template or the tokenizer refuses it: {error}") from None

    def _check_syntax(self) -> None:
        try:
            self._render([{"role": "user", "content": "x"}], None, True)
        except jinja2.TemplateSyntaxError as error:
            rule = f"not a valid template (its line {error.lineno}: {error.message})"
            raise ConfigError("chat_template", rule, "Correct it") from None
        except REFUSALS:
            pass  # valid, and wants another conversation than this one

    def _own_template(self, tools: Any) -> str:
        return self._template or str(self._tokenizer.get_chat_template(tools=tools))

    def _render(self, messages: list[Message], tools: Any, add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)

    def _missing_end(self, text: str, last: Message) -> str:
        """The end-of-sequence token where the template writes nothing behind the last answer; else nothing.

        Without one the model would not learn to stop.
        """
        eos, words, written = self._tokenizer.eos_token, words_of(last), text.rstrip()
        is_missing = last["role"] == "assistant" and words and written.endswith(words) and eos is not None
        return str(eos) if is_missing and not written.endswith(str(eos)) else ""

    def _by_marks(self, messages: list[Message], tools: Any) -> Tokens:
        """By the template's own marks, where it writes earlier turns otherwise than the last one."""
        encoded: Any = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        return self._with_bos(ids, np.where(np.array(encoded["assistant_masks"]) == 1, ids, IGNORED))

    def _tokenise(self, text: str, spans: list[Span]) -> Tokens:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1]
        labels = np.full_like(ids, IGNORED)
        for start, end in spans:
            # By a token's last character: one that a merge has drawn over the border holds the answer's first one.
            inside = (ends > start) & (ends <= end)
            labels[inside] = ids[inside]
        return self._with_bos(ids, labels)

    def _with_bos(self, ids: np.ndarray, labels: np.ndarray) -> Tokens:
        if self._bos and list(ids[:1]) != self._bos:
            ids = np.concatenate([self._bos, ids])
            labels = np.concatenate([[IGNORED], labels])
        head = int(len(ids) > 0 and int(ids[0]) == self._tokenizer.bos_token_id)
        return Tokens(ids.astype(np.int32), labels.astype(np.int32), head=head)


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


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """``messages`` as templates may want them: calls beside an empty text or none, arguments as object or text.

    Without calls there is one form. The first that a template takes, and leaves nothing out of, counts.
    """
    if not any(turn.get("tool_calls") for turn in messages):
        yield messages
        return
    for as_text in (False, True):
        for empty in ("", None):
            yield [_form(turn, empty, as_text) if turn.get("tool_calls") else turn for turn in messages]


def _form(turn: Message, empty: str | None, as_text: bool) -> Message:
    calls = turn["tool_calls"]
    if as_text:
        functions = [call["function"] for call in calls]
        texts = [json.dumps(function.get("arguments") or {}, ensure_ascii=False) for function in functions]
        calls = [
            call | {"function": function | {"arguments": text}}
            for call, function, text in zip(calls, functions, texts, strict=True)
        ]
    return turn | {"content": turn.get("content") or empty, "tool_calls": calls}


def check_messages(messages: Any, *, needs_answer: bool = True) -> None:
    """Raise :class:`BadRow`, with the turn counted from 1, unless this is a conversation to learn from.

    Args:
        needs_answer: whether only the assistant's words are learned, so that there must be some, at the end.
    """
    if not isinstance(messages, list):
        raise BadRow(f"messages is a {type(messages).__name__}, expected a list")
    if not messages:
        raise BadRow("the conversation is empty")
    for turn, message in enumerate(messages, start=1):
        _check_message(f"turn {turn}", message)
    roles = [message["role"] for message in messages]
    if not needs_answer:
        return
    if "assistant" not in roles:
        raise BadRow("no turn of the assistant")
    if roles[-1] != "assistant":
        raise BadRow(f"the conversation ends with a turn of role {roles[-1]}, nobody answers it")


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadRow(f"{name} is a {type(message).__name__}, expected an object with role and content")
    if "role" not in message:
        foreign = " (looks like ShareGPT's from and value)" if "from" in message else ""
        raise BadRow(f"{name} has no role{foreign}")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise BadRow(f"{name} has role {role!r}; roles are {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if content is None and calls:
        return
    if content is None:
        raise BadRow(f"{name} ({role}) has no content")
    if not isinstance(content, str):
        raise BadRow(f"{name} ({role}) has a {type(content).__name__} as content, expected text")
    if not content.strip() and role not in ("system", "tool") and not calls:
        raise BadRow(f"{name} ({role}) has empty content")
