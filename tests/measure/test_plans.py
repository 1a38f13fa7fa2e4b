"""The benchmark of measured plans, on two plans of a tiny model: rows, going on, and the verdict."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import llama
from benchmarks.measured_plans import good, measure_plans, stage_bytes, verdict
from tests.planner.test_host import job


@pytest.mark.slow
def test_two_plans_are_measured_once_and_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = job()
    config = llama(64, 128, 4, (4, 2), 512)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = Namespace(rows=str(tmp_path / "rows.jsonl"), repeats=1, most=2)
    rows = measure_plans(wanted, tmp_path, "tiny", options)
    assert len({row["name"] for row in rows}) == 2
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    for row in rows:
        assert len(row["bytes"]) == 4
        assert len(row["seconds"]) == 1
        assert len(stage_bytes(row)) == len(row["predicted_bytes"])

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("what is in the file is not measured again")

    monkeypatch.setattr("shardwise.testing.run_distributed", never)
    assert measure_plans(wanted, tmp_path, "tiny", options) == rows


def row(name: str, seconds: list[float], measured: int, predicted: float) -> dict[str, Any]:
    more = {"predicted_seconds": seconds[0], "predicted_bytes": [predicted], "pp": 1}
    return {"name": name, "seconds": seconds, "bytes": [measured, measured - 1]} | more


def test_the_verdict_holds_the_chosen_plan_against_the_best() -> None:
    best = row("best", [1.0, 1.1, 1.2], 100, 103.0)
    near = row("near", [1.15, 1.25, 1.3], 100, 98.0)
    slow = row("slow", [1.4, 1.5, 1.6], 100, 100.0)
    found = verdict([slow, near, best], near)
    assert (found["best"], found["chosen"], found["overlaps"]) == ("best", "near", True)
    assert found["loss"] == pytest.approx(1.25 / 1.1 - 1)
    assert (found["memory_least"], found["memory_most"]) == (pytest.approx(-0.02), pytest.approx(0.03))
    assert good(found)
    assert not good(verdict([slow, near, best], slow))
    assert not good(verdict([best, row("low", [1.0], 100, 94.0)], best))
