"""Every wrong configuration is refused with one message, before torch or transformers is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.config import apply_overrides
from shardwise.errors import ShardwiseError
from shardwise.front.resolve import prepare
from tests.cli.wrong_configurations import WRONG, Wrong, good, make_root

_PROBE = """
import json, sys
from shardwise.config import apply_overrides
from shardwise.errors import ShardwiseError
from shardwise.front.resolve import prepare
messages = []
for arguments in json.loads(sys.stdin.read()):
    try:
        prepare(apply_overrides({}, arguments))
        messages.append(None)
    except ShardwiseError as error:
        messages.append(str(error))
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
print(json.dumps({"messages": messages, "heavy": heavy}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("wrong"))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_DEVICE", raising=False)
    monkeypatch.delenv("SHARDWISE_MODELS_DIR", raising=False)


def _run(arguments: Sequence[str], root: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SHARDWISE_")}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, input=stdin, cwd=root, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_table_is_long_enough_and_its_names_differ() -> None:
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 20


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_configuration_is_refused_in_one_message(wrong: Wrong, root: Path) -> None:
    with pytest.raises(ShardwiseError) as error:
        prepare(apply_overrides({}, wrong.arguments(root)))
    message = str(error.value)
    assert error.value.exit_code == 2
    assert "\n" not in message
    for word in wrong.words:
        assert word in message
    assert not (root / "out").exists()


def test_the_configuration_behind_the_table_is_good_and_nothing_heavy_is_imported(root: Path) -> None:
    rows = [good(root), [*good(root), "tp=2", "pp=2"], *(wrong.arguments(root) for wrong in WRONG)]
    answer = _run(["-c", _PROBE], root, json.dumps(rows))
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert result["heavy"] == []
    assert result["messages"][:2] == [None, None]
    assert None not in result["messages"][2:]


@pytest.mark.parametrize("wrong", [WRONG[1], WRONG[15], WRONG[-1]], ids=lambda wrong: wrong.name)
def test_the_command_line_answers_with_status_2_and_no_traceback(wrong: Wrong, root: Path) -> None:
    answer = _run(["-m", "shardwise.cli", "train", *wrong.arguments(root)], root)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1
    for word in wrong.words:
        assert word in answer.stderr
