"""Checks of the planner's commands in the docs."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.front.planning import find_cluster
from shardwise.spec.plan import Plan
from tests.planner.test_runs import ROW


def estimates_runs(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (workspace / "runs.csv").open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(ROW))
        writer.writeheader()
        writer.writerow(ROW)
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    if "--json" in command:
        assert json.loads(result.stdout)["rows"][0]["step_seconds"] > 0
    else:
        assert ROW["id"] in result.stdout


def calibrates(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    steps = {"1024": "2.9", "2048": "6.1", "4096": "13"}
    rows = [
        ROW | {"seq_len": n, "step_seconds": s, "recompute": "none", "framework": "shardwise"} for n, s in steps.items()
    ]
    with (workspace / "runs.csv").open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert find_cluster("mine.json").stack.slowdown > 1.2


def plans_a_model(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert Plan.load(workspace / "plan.json").devices >= 1
    if "--json" in command:
        assert json.loads(result.stdout)["plans"][0]["rank"] == 1
    else:
        assert "global batch" in result.stdout
