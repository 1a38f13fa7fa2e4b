"""Rows that hold a question and its answer in two text columns, under the names that people give them.

With a chat template such a row is a conversation of two turns. Without one it is plain text: the question, a line
break, the answer, and the tokenizer's end-of-sequence token; the answer and that token are supervised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.data.chat import ChatEncoder
from shardwise.data.format import PAIR_KEYS, BadRow, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# As a chat template, so that beginning-of-sequence token, spans and tokens are found as for every conversation.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


class PairEncoder:
    """Turns a row with two text columns into :class:`Tokens`.

    Args:
        tokenizer: a Hugging Face tokenizer that gives character offsets.
        template: a chat template; None takes the tokenizer's own, and the plain text without one.
        loss: what is supervised, as of :class:`ChatEncoder`.

    Attributes:
        is_plain: whether rows become plain text, since there is no template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, loss: str = "assistant"
    ) -> None:
        self.is_plain = template is None and not tokenizer.chat_template
        self._chat = ChatEncoder(tokenizer, PLAIN_TEMPLATE if self.is_plain else template, loss)

    def __call__(self, value: dict[str, Any]) -> Tokens:
        """Ids and labels of one row.

        Raises:
            BadRow: a column that is no text or empty, or what the template refuses.
        """
        return self._chat({"messages": pair_messages(value)})


def pair_messages(value: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation of a row; an instruction and its input are joined by a line break.

    Raises:
        BadRow: a column that is no text, or an empty question or answer.
    """
    question, answer = next(keys for keys in PAIR_KEYS if set(keys) <= value.keys())
    texts = [_text(value, question), _text(value, answer)]
    if question == "instruction" and value.get("input"):
        texts[0] += f"\n{_text(value, 'input')}"
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise BadRow(f"{key} is a {type(text).__name__}, expected text")
    if not text.strip():
        raise BadRow(f"{key} is empty")
    return text
