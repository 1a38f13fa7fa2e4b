"""Step numbers as text; what is malformed is in the table of wrong configurations."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.spec.ranges import StepRange, check_last_step, parse_steps


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        (None, []),
        (3, [(3, 3)]),
        ("3", [(3, 3)]),
        ("3-5", [(3, 5)]),
        ("7,3", [(3, 3), (7, 7)]),
        (" 3 - 5 , 9 ", [(3, 5), (9, 9)]),
    ],
)
def test_steps(text: str | int | None, ranges: list[tuple[int, int]]) -> None:
    assert parse_steps(text, "key") == tuple(StepRange(*steps) for steps in ranges)


def test_the_last_step_of_a_run_can_be_named_and_no_later_one() -> None:
    check_last_step(parse_steps("3,5", "key"), 5, "key")
    check_last_step((), 0, "key")
    with pytest.raises(ConfigError, match="has 4 steps"):
        check_last_step(parse_steps("3,5", "key"), 4, "key")
