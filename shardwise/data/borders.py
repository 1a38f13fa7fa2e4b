"""Token ids of many texts at once, and how many of a text's tokens end before a place in it.

The offsets that a tokenizer gives cost more than half as much again as its ids. Where the tokens of a text are its own
bytes, one behind the other, they say the same by their lengths: so it is with byte-level vocabularies, and it is looked
at for every text. A text of which it is not true is tokenised again, with offsets.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Cut = tuple[np.ndarray, list[int]]  # ids, int32 [tokens]; of each place the number of tokens that end at or before it
_HALF = re.compile("[\ud800-\udfff]")  # no text in UTF-8 has one
_PROBE = "Ab c, 12.\n\té 好 😀"


class _Bytes(dict[int, bytes | None]):
    """What each token of a byte-level vocabulary stands for, looked up when it is met first; None: not known."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend, self._alphabet = backend, {sign: byte for byte, sign in _alphabet().items()}
        self._added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}

    def __missing__(self, number: int) -> bytes | None:
        token = self._backend.id_to_token(number)
        found: bytes | None
        if number in self._added:
            found = self._added[number].encode("utf-8")
        elif token is None or any(sign not in self._alphabet for sign in token):
            found = None
        else:
            found = bytes(self._alphabet[sign] for sign in token)
        self[number] = found
        return found


def _alphabet() -> dict[int, str]:
    """Of each byte the character that byte-level vocabularies write it as."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    found: dict[int, str] = bytes_to_unicode()
    return found


class TextTokenizer:
    """The ids of texts without special tokens around them.

    Args:
        tokenizer: a Hugging Face tokenizer; one that is not fast gives ids and no borders.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [tokens].

        Raises:
            TypeError, ValueError: the tokenizer refuses one of them.
        """
        if self._backend is None:
            found: Any = self._tokenizer(list(texts), add_special_tokens=False, verbose=False) if texts else None
            return [np.array(ids, dtype=np.int32) for ids in (found["input_ids"] if found else ())]
        rows = [one.ids for one in self._encoded(texts, "encode_batch_fast")]
        ends = list(accumulate(map(len, rows), initial=0))
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=ends[-1])
        return [flat[first:behind] for first, behind in pairwise(ends)]

    def cut(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[Cut]:
        """The ids of each text, and of each of its ``places``, numbers of characters, the tokens that end by then.

        A token counts with its last character.

        Raises:
            TypeError, ValueError: the tokenizer refuses one of them.
        """
        if self._bytes is None:
            return self._by_offsets(texts, places)
        rows = [one.ids for one in self._encoded(texts, "encode_batch_fast")]
        together = self._by_bytes(rows, texts, places)
        if together is not None:
            return together
        known = [self._by_bytes([row], [text], [found]) for row, text, found in zip(rows, texts, places, strict=True)]
        unknown = [number for number, cut in enumerate(known) if cut is None]
        again = self._by_offsets([texts[n] for n in unknown], [places[n] for n in unknown])
        return [cut for one in known for cut in ([again.pop(0)] if one is None else one)]

    @cached_property
    def _backend(self) -> Any:
        """What the tokenizer calls, where it only hands a text on: the way to it costs a tenth of the time.

        None for a tokenizer that does more.
        """
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        kind = type(self._tokenizer)
        hands_on = isinstance(self._tokenizer, PreTrainedTokenizerFast) and (
            kind.__call__ is PreTrainedTokenizerBase.__call__
            and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        )
        return self._tokenizer.backend_tokenizer if hands_on else None

    def _encoded(self, texts: Sequence[str], method: str) -> Any:
        try:
            return getattr(self._ready(), method)(list(texts), add_special_tokens=False)
        except TypeError as error:
            halves = (found[0] for text in texts if (found := _HALF.search(text)))
            half = next(halves, None)
            if half is None:
                raise
            raise ValueError(f"it holds {half!r}, one half of a character") from error

    def _ready(self) -> Any:
        """The backend as a call of the tokenizer without any settings would leave it: a script may have made others."""
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return self._backend

    @cached_property
    def _bytes(self) -> _Bytes | None:
        """What tokens stand for; None where they are not the bytes of a text."""
        if self._backend is None:
            return None
        known = _Bytes(self._backend)
        ids = self._ready().encode(_PROBE, add_special_tokens=False).ids
        return known if _joined(known, ids) == _PROBE.encode() else None

    def _by_bytes(
        self, rows: Sequence[list[int]], texts: Sequence[str], places: Sequence[Sequence[int]]
    ) -> list[Cut] | None:
        """By the lengths of the tokens of ``rows``; None unless they are the bytes of ``texts``, one by one."""
        assert self._bytes is not None
        parts = [self._bytes[number] for row in rows for number in row]
        encoded = [text.encode() for text in texts]
        if None in parts or b"".join(parts) != b"".join(encoded):  # type: ignore[arg-type]
            return None
        ends = np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)))  # type: ignore[arg-type]
        last = list(accumulate(map(len, rows), initial=0))  # tokens up to the end of each text, and its bytes
        size = list(accumulate(map(len, encoded), initial=0))
        if not np.array_equal(np.concatenate([[0], ends])[last], size):
            return None  # one begins with a part of a token
        asked = [
            start + (place if len(data) == len(text) else len(text[:place].encode()))
            for start, data, text, found in zip(size, encoded, texts, places, strict=False)
            for place in found
        ]
        before = iter(np.searchsorted(ends, asked, side="right").tolist())
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=last[-1])
        return [
            (flat[first:behind], [next(before) - first for _ in found])
            for first, behind, found in zip(last, last[1:], places, strict=False)
        ]

    def _by_offsets(self, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[Cut]:
        if not texts:
            return []
        if self._backend is None:
            found: Any = self._tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            encodings = found.encodings
        else:
            encodings = self._encoded(texts, "encode_batch")
        return [
            (np.array(one.ids, dtype=np.int32), [_tokens_before(one, place, len(text)) for place in wanted])
            for one, text, wanted in zip(encodings, texts, places, strict=True)
        ]


def _joined(known: _Bytes, ids: Sequence[int]) -> bytes | None:
    parts = [known[number] for number in ids]
    return None if None in parts else b"".join(parts)  # type: ignore[arg-type]


def _tokens_before(encoding: Any, place: int, length: int) -> int:
    """Tokens that end at or before ``place``, which is at most the ``length`` of the text."""
    if place >= length:
        return len(encoding)
    found: int | None = encoding.char_to_token(place)
    # No token holds the character, such as a space: the offsets say it, a list that takes a while to make.
    return bisect_right(encoding.offsets, place, key=itemgetter(1)) if found is None else found
