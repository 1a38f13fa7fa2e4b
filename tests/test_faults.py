"""A short version of benchmarks/faults.py: ranks are killed in every part of a job, and it ends as if nothing was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import POINTS, SAVE_STEPS, compare, judge, plan_kills
from tests.checkpoint.fakes import fake_checkpoint


def test_kills_are_spread_over_parts_points_and_steps() -> None:
    kills = plan_kills(100, steps=200)
    for part, points in POINTS.items():
        assert {kill.point for kill in kills if kill.part == part} == {point.rstrip("*") for point in points}
        assert sum(kill.part == part for kill in kills) == 25
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert kills[-1].step < 200 - SAVE_STEPS


def _job(folder: Path, weights: str | None, *notes: dict[str, Any]) -> Path:
    (folder / "export").mkdir(parents=True)
    if weights is not None:
        (folder / "export" / "model.safetensors").write_text(weights)
    (folder / "kills-done.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    fake_checkpoint(folder / "checkpoints", 6, {})
    return folder


def test_a_job_is_judged_by_kills_restarts_checkpoints_and_weights(tmp_path: Path) -> None:
    notes = [{"part": "step", "made": 7, "saved": 6}, {"part": "save", "made": 6, "saved": 3}]
    alone, killed = _job(tmp_path / "alone", "1"), _job(tmp_path / "killed", "1", *notes)
    said = "a; restart 1 of 3\nb; restart 2 of 3\npassed over step-00000009: its save came to no end\n"
    found = judge(killed, alone, said, 9)
    assert found.holds(2)
    assert not found.holds(3)
    assert found.steps_lost == 2.0
    assert not judge(killed, alone, said + "c; restart 3 of 3\n", 9).holds(2)
    harm = "passed over step-00000003: the content of its .metadata is not what was written\n"
    assert judge(killed, alone, said + harm, 9).damaged == 1
    (killed / "checkpoints" / "step-00000009").mkdir()
    assert judge(killed, alone, said, 9).damaged == 1
    (killed / "export" / "model.safetensors").write_text("2")
    assert not judge(killed, alone, said, 9).equal
    nothing = _job(tmp_path / "nothing", None, *notes)
    assert not judge(nothing, _job(tmp_path / "none", None), said, 9).equal


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_ends_bit_equal_however_its_ranks_are_killed(tmp_path: Path) -> None:
    found = compare(tmp_path, number=4, steps=12, timeout=280.0, background=True)
    assert found.holds(4)
    assert found.kills == {"start-up": 1, "step": 1, "save": 1, "publish": 1}
    assert found.restarts == 4
    assert found.damaged == 0
    assert found.equal
    assert found.restart_seconds > 0
