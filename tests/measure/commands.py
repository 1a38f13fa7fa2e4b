"""Checks of `shardwise measure` in the docs: what it does with a measurement; test_measure.py really measures."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.front.planning import find_cluster
from shardwise.measure.samples import Samples
from tests.measure.made_samples import made_samples


def measures(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def made(processes: int, level: str) -> Samples:
        asked.append((processes, level))
        return made_samples(processes)

    monkeypatch.setattr("shardwise.front.measuring.measure", made)
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "products fp32" in result.stdout
    level = "quick" if "--quick" in command else "full"
    assert [one for _, one in asked] == ([] if "--show" in command else [level])
    if "--output" in command:
        assert find_cluster("machine.json").devices_per_node == 4


MEASURING = dict.fromkeys(
    (
        "shardwise measure",
        "shardwise measure --quick --devices 4 --output machine.json",
        "shardwise measure --devices 4 --show",
    ),
    measures,
)
