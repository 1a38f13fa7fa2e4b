"""How the commands of docs/en/check.md are checked by the tests of the docs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.front.checking import CheckResult
from shardwise.front.resolve import prepare
from shardwise.spec.plan import Plan


def checks_a_plan(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan resolves; tests/check/test_check.py really checks plans."""
    plans: list[Plan] = []

    def stop_after_prepare(tree: dict[str, Any]) -> Any:
        plans.append(prepare(tree, command="check")[1])
        return CheckResult(0, None)

    monkeypatch.setattr("shardwise.front.checking.run_check", stop_after_prepare)
    words = shlex.split(command)[1:]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert plans[0].strategy.tp == 2


def shows_a_model(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM" in result.stdout
    assert "vocab_head" in result.stdout
