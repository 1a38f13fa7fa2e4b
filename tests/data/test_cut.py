from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.cut import shorten, split
from shardwise.data.format import IGNORED, Tokens


def tokens(labels: str, head: int = 0) -> Tokens:
    """Ids 0, 1, 2, ...; ``x`` is supervised, ``.`` is not."""
    ids = np.arange(len(labels), dtype=np.int32)
    learned = np.array([mark == "x" for mark in labels])
    return Tokens(ids, np.where(learned, ids, IGNORED).astype(np.int32), None, head)


def kept(labels: str, length: int, head: int = 0) -> list[int] | None:
    cut = shorten(tokens(labels, head), length)
    return None if cut is None else cut.input_ids.tolist()


def test_what_stays_of_a_row() -> None:
    assert kept("xxxxxx", 4) == [0, 1, 2, 3]  # a text
    assert kept(".xxxxx", 4, head=1) == [0, 1, 2, 3]  # behind a BOS
    assert kept("..xx..xx", 6) == [0, 1, 2, 3]  # the turns up to the last whole answer
    assert kept("..xx....", 6) == [0, 1, 2, 3, 4, 5]
    assert kept(".....xx", 4) == [3, 4, 5, 6]  # the end of the prompt, and the answer
    assert kept(".....xx", 4, head=1) == [0, 4, 5, 6]
    assert kept(".....xx", 3, head=1) is None  # nothing would stand before the answer
    assert kept("..xxxxx", 5) is None
    assert kept("......", 3) is None
    positions = Tokens(*(np.arange(7, dtype=np.int32),) * 3)
    assert shorten(positions, 3) is not None
    learned = tokens(".....xx")
    assert shorten(Tokens(learned.input_ids, learned.labels, learned.input_ids), 4) is None  # a hole in positions


@given(st.text(".x", min_size=2, max_size=30), st.integers(1, 29), st.integers(0, 1))
def test_a_cut_row_is_short_and_teaches_whole_answers(labels: str, length: int, head: int) -> None:
    row = tokens(labels, head)
    cut = shorten(row, length) if length < len(labels) else None
    if cut is None:
        return
    assert len(cut.input_ids) <= length
    assert (cut.labels[1:] != IGNORED).any()
    assert set(cut.labels) <= {IGNORED, *cut.input_ids}
    if "." not in labels[max(1, head) :]:  # a text
        return
    for place in cut.labels[cut.labels != IGNORED]:  # its answer is there to its end
        end = labels.find(".", int(place))
        assert set(range(int(place), len(labels) if end < 0 else end)) <= set(cut.input_ids.tolist())


@given(st.integers(2, 40), st.integers(2, 12), st.integers(0, 1))
def test_a_text_in_several_rows_is_predicted_once(number: int, length: int, head: int) -> None:
    text = tokens("." * head + "x" * number, head)
    rows = split(text, length)
    assert rows is not None
    assert all(2 <= len(row.input_ids) <= length for row in rows)
    assert [place for row in rows for place in row.labels[1:].tolist()] == list(range(1, head + number))
    for before, row in pairwise(rows):
        assert row.input_ids[0] == (0 if head else before.input_ids[-1])


def test_what_is_not_learned_as_a_whole_is_not_split() -> None:
    assert split(tokens("..xx..xx"), 4) is None
    whole = tokens("xxxxxx")
    assert split(Tokens(whole.input_ids, whole.labels, whole.input_ids), 4) is None
