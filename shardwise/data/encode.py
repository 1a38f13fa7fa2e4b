"""From the inner form of a row to its tokens, with one tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.borders import TextTokenizer
from shardwise.data.chat import ChatEncoder
from shardwise.data.format import IGNORED, BadRow, Conversation, Sample, Text, Tokens, check_ids
from shardwise.data.pairs import PairEncoder
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import leading_bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextEncoder:
    """Turns :class:`Text` into :class:`Tokens`: a BOS where the tokenizer puts one, the pieces, one EOS.

    The whole text is tokenised once. A token belongs to the piece of its last character, as those of a conversation.
    ``loss`` is ``data.loss``: ``all_turns`` and ``text`` supervise every piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss: str = "assistant") -> None:
        self._tokenizer, self._all = tokenizer, loss in ("all_turns", "text")
        self._texts = TextTokenizer(tokenizer)
        self._bos, self._eos = leading_bos(tokenizer), tokenizer.eos_token_id

    def __call__(self, row: Text) -> Tokens:
        """Ids and labels of one row.

        Raises:
            BadRow: the tokenizer refuses the text.
            ConfigError: as :meth:`many`.
        """
        try:
            return self.many([row])[0]
        except (TypeError, ValueError) as error:
            raise BadRow(f"the tokenizer refuses it: {error}") from None

    def many(self, rows: Sequence[Text]) -> list[Tokens]:
        """The tokens of rows, tokenised together, which costs a fraction of one by one.

        Raises:
            ConfigError: a row of which a part alone is supervised, and a tokenizer that cannot tell which tokens it is.
            TypeError, ValueError: the tokenizer refuses one of them.
        """
        texts = ["".join(piece for piece, _ in row.pieces) for row in rows]
        if all(self._is_whole(row) for row in rows):
            return [self._with_ends(ids, ids, is_learned=True) for ids in self._texts.ids(texts)]
        if not self._tokenizer.is_fast:
            name = type(self._tokenizer).__name__
            rule = "a prompt and its completion need a tokenizer that gives character offsets (a fast one)"
            raise ConfigError(f"tokenizer = {name}", rule, 'Tokenise the rows yourself: {"input_ids", "labels"}')
        places = [[*accumulate(len(piece) for piece, _ in row.pieces)] for row in rows]
        return [self._labelled(*cut, row) for cut, row in zip(self._texts.cut(texts, places), rows, strict=True)]

    def _is_whole(self, row: Text) -> bool:
        return self._all or all(supervised for _, supervised in row.pieces)

    def _labelled(self, ids: np.ndarray, borders: list[int], row: Text) -> Tokens:
        labels = ids.copy()
        for first, behind, (_, supervised) in zip([0, *borders], borders, row.pieces, strict=False):
            if not (supervised or self._all):
                labels[first:behind] = IGNORED
        return self._with_ends(ids, labels, is_learned=self._all or row.pieces[-1][1])

    def _with_ends(self, ids: np.ndarray, labels: np.ndarray, *, is_learned: bool) -> Tokens:
        added = [] if ids[:1].tolist() == self._bos else self._bos
        end = [] if self._eos is None or ids[-1:].tolist() == [self._eos] else [self._eos]
        whole, learned = np.empty((2, len(added) + len(ids) + len(end)), dtype=np.int32)
        begin, behind = len(added), len(added) + len(ids)
        whole[:begin], whole[begin:behind], whole[behind:] = added, ids, end
        learned[:begin], learned[begin:behind], learned[behind:] = IGNORED, labels, end if is_learned else IGNORED
        return Tokens(whole, learned, head=int(len(whole) > 0 and int(whole[0]) == self._tokenizer.bos_token_id))


class RowEncoder:
    """Turns every inner form into :class:`Tokens`; the tokenizer is loaded at the first row that needs one.

    Args:
        tokenizer: gives the tokenizer.
        template: a chat template; None takes the tokenizer's own.
        vocab_size: rows of the model's embedding; every id is below it.
        loss: what is supervised, ``data.loss``.
        settings: what every row gives to the chat template, ``data.chat_template_kwargs``; a row's own come first.

    Attributes:
        notes: what is to be said, once, of how rows are read; who says it takes it out.
    """

    def __init__(
        self,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        template: str | None,
        vocab_size: int,
        loss: str = "assistant",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._load, self._template, self._vocab_size, self._loss = tokenizer, template, vocab_size, loss
        self._settings = dict(settings or {})
        self.notes: list[str] = []

    def __call__(self, row: Sample) -> Tokens:
        """The tokens of a row.

        Raises:
            BadRow: the row cannot be encoded.
            ConfigError: there is no tokenizer or no template that it could be encoded with.
        """
        if isinstance(row, Tokens):
            return row  # its ids were checked where they were read
        if isinstance(row, Text):
            tokens = self._text(row)
        else:
            tokens = self._pairs(self._turns(row)) if row.is_pair else self._chat(self._turns(row))
        self._check(tokens)
        return tokens

    def many(self, rows: Sequence[Sample]) -> list[Tokens | BadRow]:
        """The tokens of rows in their order; of one that cannot be encoded the reason.

        Raises:
            ConfigError: as for one row.
        """
        texts = [row for row in rows if isinstance(row, Text)]
        known: dict[int, Tokens | BadRow] = {}
        if texts:
            with suppress(TypeError, ValueError):  # then each by itself, to find out which
                known = dict(zip(map(id, texts), self._text.many(texts), strict=True))
        for is_pair in (False, True):
            talks = [row for row in rows if isinstance(row, Conversation) and row.is_pair == is_pair]
            if talks:
                encode = self._pairs if is_pair else self._chat
                known |= zip(map(id, talks), encode.many([self._turns(row) for row in talks]), strict=True)
        return [self._one(row, known.get(id(row))) for row in rows]

    def _one(self, row: Sample, known: Tokens | BadRow | None) -> Tokens | BadRow:
        try:
            if known is None:
                return self(row)
            if isinstance(known, Tokens):
                self._check(known)
        except BadRow as error:
            return error
        return known

    def _turns(self, row: Conversation) -> dict[str, Any]:
        """A conversation as its encoders take it; where every turn is learned, a prompt is too."""
        learned = row.unflagged if row.is_completion and self._loss == "all_turns" else row.learned
        settings = self._settings | (row.settings or {})
        return {"messages": row.messages, "tools": row.tools, "learned": learned, "settings": settings}

    def _check(self, tokens: Tokens) -> None:
        """Refuse an id that the model does not have; where it has all of the tokenizer's none is looked at."""
        if not self._has_all_ids:
            check_ids(tokens.input_ids, self._vocab_size, "the tokenizer's id")

    @cached_property
    def _has_all_ids(self) -> bool:
        return max(self.tokenizer.get_vocab().values(), default=0) < self._vocab_size

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded now if it was not."""
        return self._load()

    @cached_property
    def _text(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, self._loss)

    @cached_property
    def _chat(self) -> ChatEncoder:
        encoder = ChatEncoder(self.tokenizer, self._template, self._loss)
        if encoder.default_template is not None:
            used = repr(encoder.default_template)
            self.notes.append(f"the tokenizer has no chat template, so this one is used: {used}")
        return encoder

    @cached_property
    def _pairs(self) -> PairEncoder:
        encoder = PairEncoder(self.tokenizer, self._template, self._loss)
        if encoder.is_plain:
            self.notes.append("the tokenizer has no chat template: a row is its question, a line break, and its answer")
        return encoder
