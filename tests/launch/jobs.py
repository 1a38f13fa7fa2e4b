"""Jobs for the tests: a launcher in a process of its own, and a way to see that nothing of it is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 140.0  # of one job: some 6 s on two quiet cores, many times that on busy ones
_MARK = "SHARDWISE_TEST_JOB"
LAUNCHER = """
import sys
from pathlib import Path
from shardwise.launch.agent import launch
sys.exit(launch(Path(sys.argv[1]), int(sys.argv[2]), target="tests.launch.targets:" + sys.argv[3]))
"""


@dataclass
class Job:
    """A started command; ``output_dir`` is where it writes, ``mark`` is in the environment of all its processes."""

    process: subprocess.Popen[str]
    output_dir: Path
    mark: str
    stdout: str = ""
    stderr: str = ""

    def pids(self) -> set[int]:
        """Living processes of the job, the launcher too."""
        return {pid for pid in _all_pids() if f"{_MARK}={self.mark}".encode() in _environment(pid)}

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """The exit status; stdout and stderr are kept. Fails, with the end of stderr, when the time is up."""
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            end = (late.stderr or b"").decode(errors="replace")[-600:]
            raise AssertionError(f"the job still ran after {seconds} s; its last words: {end}") from late
        return self.process.returncode

    def status(self) -> dict[str, Any]:
        """``status.json``."""
        status: dict[str, Any] = json.loads((self.output_dir / "status.json").read_text(encoding="utf-8"))
        return status

    def rank_pids(self, num_ranks: int) -> list[int]:
        """Process ids of the ranks, once all have written ``begun-N``."""
        paths = [self.output_dir / f"begun-{rank}" for rank in range(num_ranks)]
        self.wait_for(lambda: all(path.exists() and path.read_text() for path in paths))
        return [int(path.read_text()) for path in paths]

    def wait_for(self, condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
        """Wait for something to hold while the launcher lives."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the launcher ended early: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.02)


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # empty for a dead process that is not yet waited for
    except OSError:
        return b""


def seconds_until_gone(job: Job, limit: float = 30.0) -> float:
    """How long processes of the job are still there; fails after ``limit``."""
    start = time.monotonic()
    while left := job.pids():
        assert time.monotonic() - start < limit, f"processes left behind: {left}"
        time.sleep(0.02)
    return time.monotonic() - start


def free_endpoint() -> str:
    """Where the launchers of several machines, all on this one, can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def command(output_dir: Path, *arguments: str, **variables: str) -> Iterator[Job]:
    """Start Python with these arguments. At the end of the block the job must have left no process behind.

    Whatever goes wrong in the block, its processes are killed.
    """
    mark = uuid.uuid4().hex
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {_MARK: mark, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"} | variables
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    job = Job(process, output_dir, mark)
    try:
        yield job
        seconds_until_gone(job)
    finally:
        for pid in job.pids():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        process.wait(LIMIT_SECONDS)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def launched(
    output_dir: Path, target: str, num_ranks: int = 3, grace_seconds: float = 60.0, **variables: str
) -> Iterator[Job]:
    """A job whose ranks run a function of ``tests.launch.targets``."""
    prepare(output_dir, grace_seconds)
    with command(output_dir, "-c", LAUNCHER, str(output_dir), str(num_ranks), target, **variables) as job:
        yield job


def prepare(output_dir: Path, grace_seconds: float = 60.0) -> None:
    """The two files that launch and worker read."""
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "run.yaml").write_text(f"save: {{grace_seconds: {grace_seconds}}}\n", encoding="utf-8")
    (output_dir / "plan.json").write_text('{"device_type": "cpu"}', encoding="utf-8")
