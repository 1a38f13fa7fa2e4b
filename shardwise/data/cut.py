"""Rows that are too long, cut so that what is left still teaches.

An answer stays whole, with the end of its turn. A text that is learned as a whole may also become several rows.
"""

from __future__ import annotations

import numpy as np

from shardwise.data.format import IGNORED, Tokens


def shorten(tokens: Tokens, length: int) -> Tokens | None:
    """``tokens`` cut to at most ``length``, None where nothing that is left would be supervised.

    A text that is supervised as a whole keeps its beginning. A conversation keeps its turns up to the last answer
    that fits as a whole. If not even the first one does, its prompt loses its beginning (but for ``tokens.head``):
    the answer stays. An answer that is too long by itself is not cut.
    """
    supervised = tokens.labels != IGNORED
    if _is_whole(tokens):
        return _kept(tokens, np.arange(length))
    starts, ends = _runs(supervised)
    fitting = ends[ends <= length]
    if len(fitting) == len(ends):  # what is beyond is not supervised
        return _kept(tokens, np.arange(length))
    if len(fitting) and fitting[-1] > 1:
        return _kept(tokens, np.arange(fitting[-1]))
    start, end = int(starts[len(fitting)]), int(ends[len(fitting)])
    room = length - tokens.head - (end - start)  # for the end of the prompt
    if room < 1 or tokens.position_ids is not None:
        return None
    return _kept(tokens, np.concatenate([np.arange(tokens.head), np.arange(start - room, end)]))


def split(tokens: Tokens, length: int) -> list[Tokens] | None:
    """``tokens`` as rows of at most ``length``, at least 2; None unless they are learned as a whole.

    Each row begins as the text does where that keeps a ``head``, else with the last token of the row before it: so
    every token is predicted once, as in the text, but for what stood further before it.
    """
    if not _is_whole(tokens) or tokens.position_ids is not None:
        return None
    head, step = tokens.head, length - max(1, tokens.head)
    rows = []
    for start in range(max(1, head), len(tokens.labels), step):
        before = np.arange(head) if head else np.array([start - 1])
        kept = np.concatenate([before, np.arange(start, min(start + step, len(tokens.labels)))])
        rows.append(Tokens(tokens.input_ids[kept], tokens.labels[kept], None, head))
    return rows


def _is_whole(tokens: Tokens) -> bool:
    """Whether every token is supervised; the first label predicts nothing, so a BOS may be without."""
    return bool((tokens.labels[max(1, tokens.head) :] != IGNORED).all())


def _runs(supervised: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where supervised tokens that follow each other start and end (exclusive)."""
    edges = np.diff(np.concatenate([[0], supervised.astype(np.int8), [0]]))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def _kept(tokens: Tokens, places: np.ndarray) -> Tokens | None:
    labels = tokens.labels[places]
    if not (labels[1:] != IGNORED).any():
        return None
    positions = None if tokens.position_ids is None else tokens.position_ids[places]
    return Tokens(tokens.input_ids[places], labels, positions, tokens.head)
