"""Two runs never work in one folder; whatever ends the first frees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.launch import lock
from shardwise.launch.lock import claim, release_all

_OWNER = """
import sys
from pathlib import Path
from shardwise.launch.lock import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["regular", "killed"])
def test_the_second_run_is_refused_while_the_first_lives(tmp_path: Path, end: str) -> None:
    output = tmp_path / "new" / "out"
    command = [sys.executable, "-c", _OWNER, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=f"another run is at work in it \\(process {owner.pid}\\)"):
            claim(output)
        if end == "killed":
            os.kill(owner.pid, signal.SIGKILL)
        else:
            owner.communicate()
    assert (output / lock.FILE_NAME).exists() == (end == "killed")
    try:
        claim(output)
        claim(output)  # the same run once more
    finally:
        release_all()
    assert not list(output.iterdir())


def test_a_file_that_its_owner_removes_meanwhile_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / lock.FILE_NAME, os.open
    num_opened = 0

    def open_and_lose(name: Path, *arguments: int) -> int:
        nonlocal num_opened
        descriptor = opened(name, *arguments)
        num_opened += 1
        if num_opened == 1:
            path.unlink()
        return descriptor

    monkeypatch.setattr(lock.os, "open", open_and_lose)
    try:
        claim(tmp_path)
        assert num_opened == 2
        assert path.read_text() == str(os.getpid())
    finally:
        release_all()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        claim(tmp_path / "file" / "out")
