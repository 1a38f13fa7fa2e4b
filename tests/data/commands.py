"""Checks of the commands about data in the docs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.data.prepared import open_prepared


def shows_data(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    if "--json" not in command:
        assert "«" in result.stdout
        assert "FILE.jsonl: 8 rows in use of 8 (tokens)" in result.stdout
        return
    answer = json.loads(result.stdout)
    assert [row["line"] for row in answer["rows"]] == [1]
    assert answer["epoch"]["rows"] == answer["sources"][0]["rows"] == 8


def prepares_data(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    folders = result.stdout.split()
    assert [len(open_prepared(Path(folder))[0]) for folder in folders] == [8] * len(folders)
    assert folders
