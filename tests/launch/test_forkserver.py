"""The fork server starts in the places that machines have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launch.jobs import ROOT


def test_a_long_folder_for_temporary_files_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    code = "from shardwise.launch import forkserver as f\nf.start()\nf.stop()\nprint('started')"
    environ = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (answer.returncode, answer.stdout) == (0, "started\n"), answer.stderr
