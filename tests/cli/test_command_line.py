"""Broken files, arguments and usage are answered by one message and status 2, and so is the whole table."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from shardwise import cli
from shardwise.front import training
from tests.cli.wrong_configurations import WRONG, Wrong, good, make_root

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 5.0  # of a processor: the machine is shared


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("command-line"))


def _shardwise(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SHARDWISE_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "shardwise.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _refusal(arguments: Sequence[str], folder: Path) -> str:
    """What `shardwise train` says; fails unless it is a refusal with status 2 in time."""
    begin = _child_seconds()
    answer = _shardwise(["train", *arguments], folder)
    assert answer.returncode == 2, answer.stderr
    assert _child_seconds() - begin < _LIMIT_SECONDS
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    return answer.stderr


def _one_line(message: str) -> str:
    (line,) = message.splitlines()
    assert line.startswith("shardwise: ")
    return line


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_every_wrong_configuration_of_the_table(wrong: Wrong, root: Path) -> None:
    line = _one_line(_refusal(wrong.arguments(root), root))
    for word in wrong.words:
        assert word in line
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: tiny\ntrain: {epochs: 1\n", ["run.yaml, line 3", "YAML"]),
        ("model: tiny\nmodel: other\n", ["run.yaml, line 2", "'model'", "twice", "line 1"]),
        ("model: tiny\ntrain:\n  sede: 1\n", ["train.sede = 1", "unknown key", "train.seed?"]),
        ("", ["run.yaml", "is empty"]),
    ],
)
def test_a_broken_run_yaml(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    line = _one_line(_refusal(["run.yaml"], tmp_path))
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.seed="], ["argument 'train.seed='", "has no value"]),
        (["=3"], ["argument '=3'", "key=value"]),
        (["stages=[4,"], ["argument 'stages=[4,'", "YAML"]),
        (["rum.yaml"], ["rum.yaml", "no such file", "run.yaml"]),
        (["micro_batch_size=3", "train.global_batch_size=8"], ["= 8", "micro_batch_size 3", "6 or 9"]),
    ],
)
def test_a_malformed_argument(arguments: list[str], words: list[str], root: Path) -> None:
    (root / "run.yaml").write_text("model: tiny\n", encoding="utf-8")
    line = _one_line(_refusal([*good(root), *arguments], root))
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "a.yaml", "b.yaml"], ["a.yaml, b.yaml", "more than one run.yaml"]),
        (["train", "--nonsense"], ["--nonsense", "no such option", "shardwise train --help"]),
        (["train", "--device-s", "3"], ["--device-s", "no such option", "--devices?"]),
        (["train", "--devices", "x"], ["'--devices'", "integer"]),
        (["train", "--devices"], ["--devices", "requires an argument"]),
        (["trian"], ["'trian'", "'train'?"]),
        (["generate"], ["Missing argument", "folder", "shardwise generate --help"]),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    answer = _shardwise(arguments, tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    line = _one_line(answer.stderr)
    for word in words:
        assert word.lower() in line.lower()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_is_no_error(arguments: list[str], tmp_path: Path) -> None:
    answer = _shardwise(arguments, tmp_path)
    assert answer.returncode == 0
    assert "Usage: shardwise" in answer.stdout


def test_a_bare_command_shows_its_help(tmp_path: Path) -> None:
    answer = _shardwise([], tmp_path)
    assert answer.returncode == 2
    assert "Usage: shardwise" in answer.stdout


@pytest.mark.parametrize(("raised", "code"), [(typer.Exit(143), 143), (KeyboardInterrupt(), 130), (typer.Abort(), 1)])
def test_the_status_of_a_command_is_passed_on(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(tree: object) -> int:
        raise raised

    monkeypatch.setattr(training, "train", command)
    monkeypatch.setattr(sys, "argv", ["shardwise", "train"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == code
