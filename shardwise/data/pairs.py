"""Rows that hold a question and its answer in two text columns, under the names that people give them.

With a chat template such a row is a conversation of two turns. Without one it is plain text: the question, a line
break, the answer, and the tokenizer's end-of-sequence token; the answer and that token are supervised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.data.chat import ChatEncoder
from shardwise.data.format import BadRow, Tokens

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
        """Ids and labels of one row, given as its turns (``messages``).

        Raises:
            BadRow: what the template refuses.
        """
        return self._chat(value)

    def many(self, values: Sequence[dict[str, Any]]) -> list[Tokens | BadRow]:
        """Ids and labels of rows in their order; of one that the template refuses the reason."""
        return self._chat.many(values)
