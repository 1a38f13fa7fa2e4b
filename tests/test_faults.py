"""A short version of benchmarks/faults.py: ranks are killed in every part of a job, and it ends as if nothing was."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import POINTS, SAVE_STEPS, compare, plan_kills


def test_kills_are_spread_over_parts_points_and_steps() -> None:
    kills = plan_kills(100, steps=200)
    for part, points in POINTS.items():
        assert {kill.point for kill in kills if kill.part == part} == {point.rstrip("*") for point in points}
        assert sum(kill.part == part for kill in kills) == 25
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert kills[-1].step < 200 - SAVE_STEPS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_ends_bit_equal_however_its_ranks_are_killed(tmp_path: Path) -> None:
    found = compare(tmp_path, number=4, steps=12, timeout=140.0, background=True)
    assert found.kills == {"start-up": 1, "step": 1, "save": 1, "publish": 1}
    assert found.restarts == 4
    assert found.damaged == 0
    assert found.equal
    assert found.restart_seconds > 0
