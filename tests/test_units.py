"""Numbers in the words of messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.units import format_exact


@given(st.floats(allow_nan=False))
def test_an_exact_text_gives_the_number_back(value: float) -> None:
    assert float(format_exact(value)) == value


def test_round_numbers_are_short() -> None:
    assert [format_exact(value) for value in (16.0, 0.1, 1e-5, 1234567.0)] == ["16", "0.1", "1e-05", "1234567.0"]
