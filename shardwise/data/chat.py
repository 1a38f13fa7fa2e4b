"""Conversations to token ids, through the model's own chat template, with the loss on what the assistant says.

The template is rendered for the whole conversation and for its prefixes. A turn of the assistant is supervised from
the end of the generation prompt (what a server would feed the model) to the end of the turn as the template writes
it, its end-of-turn token included. The whole text is tokenised once; the offsets of its tokens say which of them lie
in a supervised span, so no token id depends on where a turn ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from shardwise.data.format import IGNORED, BadRow, Tokens
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import leading_bos
from shardwise.spec.template import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
# What a template raises by itself or by a conversation that it was not written for, and a tokenizer on broken text.
_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]  # (messages, add_generation_prompt) -> text


class ChatEncoder:
    """Turns a ``messages`` row into :class:`Tokens` with one tokenizer and one template.

    Args:
        tokenizer: a Hugging Face tokenizer that gives character offsets.
        template: a file or the text of a template; None takes the tokenizer's own.

    Raises:
        ConfigError: no template, one that is not valid, or a tokenizer without offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        name = type(tokenizer).__name__
        if not tokenizer.is_fast:
            rule = "messages need a tokenizer that gives character offsets (a fast one)"
            raise ConfigError(f"tokenizer = {name}", rule, 'Tokenise the rows yourself: {"input_ids", "labels"}')
        self._tokenizer = tokenizer
        self._template = template_text(template) if template is not None else _own_template(tokenizer)
        self._check_syntax()
        self._bos = leading_bos(tokenizer)

    def __call__(self, value: dict[str, Any]) -> Tokens:
        """Ids and labels of one row.

        Raises:
            BadRow: messages that are malformed, that the template refuses, or whose turns cannot be told apart in
                what the template writes.
        """
        messages, tools = value["messages"], value.get("tools")
        check_messages(messages)

        def render(part: list[Message], add_generation_prompt: bool) -> str:
            return self._render(part, tools, add_generation_prompt)

        try:
            text = render(messages, False)
            spans = assistant_spans(messages, text, render)
            if value.get("learned") is not None:
                answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
                spans = [span for place, span in zip(answers, spans, strict=True) if place in value["learned"]]
            return self._tokenise(text, spans)
        except BadRow:
            raise
        except _REFUSALS as error:
            raise BadRow(f"the chat template or the tokenizer refuses it: {error}") from None

    def _check_syntax(self) -> None:
        try:
            self._render([{"role": "user", "content": "x"}], None, True)
        except jinja2.TemplateSyntaxError as error:
            rule = f"not a valid template (its line {error.lineno}: {error.message})"
            raise ConfigError("chat_template", rule, "Correct it") from None
        except _REFUSALS:
            pass  # valid, and wants another conversation than this one

    def _render(self, messages: list[Message], tools: Any, add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text)

    def _tokenise(self, text: str, spans: list[tuple[int, int]]) -> Tokens:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1]
        labels = np.full_like(ids, IGNORED)
        for start, end in spans:
            # By a token's last character: one that a merge has drawn over the border holds the answer's first one.
            inside = (ends > start) & (ends <= end)
            labels[inside] = ids[inside]
        if self._bos and list(ids[:1]) != self._bos:
            ids = np.concatenate([self._bos, ids])
            labels = np.concatenate([[IGNORED], labels])
        return Tokens(ids.astype(np.int32), labels.astype(np.int32))


def check_messages(messages: Any) -> None:
    """Raise :class:`BadRow`, with the turn counted from 1, unless this is a conversation to learn from."""
    if not isinstance(messages, list):
        raise BadRow(f"messages is a {type(messages).__name__}, expected a list")
    if not messages:
        raise BadRow("the conversation is empty")
    for turn, message in enumerate(messages, start=1):
        _check_message(f"turn {turn}", message)
    roles = [message["role"] for message in messages]
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
    if content is None:
        raise BadRow(f"{name} ({role}) has no content")
    if not isinstance(content, str):
        raise BadRow(f"{name} ({role}) has a {type(content).__name__} as content, expected text")
    if not content.strip() and role != "system":
        raise BadRow(f"{name} ({role}) has empty content")


def assistant_spans(messages: list[Message], text: str, render: Render) -> list[tuple[int, int]]:
    """Character spans ``[start, end)`` of the assistant's turns in ``text``, the rendering of all ``messages``.

    Raises:
        BadRow: the template writes the beginning of this conversation otherwise when more turns follow, or leaves
            out what the assistant says.
    """
    spans = []
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content = message["content"].strip()
        start = _start(messages[:k], content, text, render)
        until = text if k == len(messages) - 1 else render(messages[: k + 1], False)
        end = len(until) if text.startswith(until) else _end_by_content(content, until, text, start)
        if start is None or end is None or end <= start:
            rule = "the chat template writes it otherwise when the conversation goes on; give another chat_template"
            raise BadRow(f"turn {k + 1} (assistant) cannot be found: {rule}, or tokenise the rows yourself")
        # Its last line, since a template may set a thought before the answer apart.
        if content.splitlines()[-1] not in text[start:end]:
            raise BadRow(f"the chat template leaves out the text of turn {k + 1} (it may want a list of parts)")
        spans.append((start, end))
    return spans


def _start(before: list[Message], content: str, text: str, render: Render) -> int | None:
    """Where the answer to ``before`` starts in ``text``: behind the generation prompt.

    Some generation prompts begin a thought that a finished turn does not have: then it starts where the two part, and
    no later than its content.
    """
    prompt = render(before, True)
    if text.startswith(prompt):
        return len(prompt)
    plain = render(before, False)
    if not text.startswith(plain):
        return None
    pairs = enumerate(zip(prompt, text, strict=False))
    parting = next((place for place, (ours, theirs) in pairs if ours != theirs), len(text))
    place = text.find(content, len(plain))
    return min(parting, place) if place >= 0 else parting


def _end_by_content(content: str, until: str, text: str, start: int | None) -> int | None:
    """End of a turn that the template decorates only while it is the last one (an empty thought, say).

    What follows the content in ``until``, where the turn is last, is its end; the same must follow it in ``text``.
    """
    if start is None:
        return None
    _, found, tail = until.rpartition(content)
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    end = begin + len(content)
    return end + len(tail) if found and text.startswith(content + tail, begin) else None


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        rule = "the data has messages and the model's tokenizer has no chat template"
        remedy = "Give one with chat_template=FILE, or tokenise the rows yourself"
        raise ConfigError("chat_template", rule, remedy) from None
