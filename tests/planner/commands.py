"""Checks of the planner's commands in the docs."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
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
