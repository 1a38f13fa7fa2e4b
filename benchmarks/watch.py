"""Watch a job from outside: when its steps end, the CPU time and the memory of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.02
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class StepRecord:
    """What was seen of a job: at the end of each step the clock, and the CPU seconds of all its processes.

    Memory is anonymous memory (RssAnon): of the largest process at any time, and of all together at one time. A page
    that several processes share counts for each of them, so the sum is no less than what the job takes.
    """

    began: float
    ends: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_rank_bytes: int = 0
    peak_total_bytes: int = 0
    exit_code: int | None = None


def watch(
    command: Sequence[str], environment: Mapping[str, str], steps_file: Path, log: Path, timeout: float
) -> StepRecord:
    """Run ``command`` to its end; ``steps_file`` gets a JSON line with ``step`` and ``loss`` for each step.

    A job that takes longer than ``timeout`` seconds is killed with all its processes.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    record = StepRecord(time.monotonic())
    while (code := process.poll()) is None:
        _look(record, process.pid, steps_file)
        if time.monotonic() - record.began > timeout:
            for pid in [*descendants(process.pid), process.pid]:
                _kill(pid)
        time.sleep(POLL_SECONDS)
    record.exit_code = code
    return record


def _look(record: StepRecord, root: int, steps_file: Path) -> None:
    pids = [root, *descendants(root)]
    sizes = list(map(_anonymous_bytes, pids))
    record.peak_rank_bytes = max(record.peak_rank_bytes, *sizes)
    record.peak_total_bytes = max(record.peak_total_bytes, sum(sizes))
    lines = steps_file.read_text(encoding="utf-8").splitlines(keepends=True) if steps_file.exists() else []
    done = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [line for line in done if "loss" in line][len(record.losses) :]
    if steps:
        now, cpu = time.monotonic(), sum(map(_cpu_seconds, pids))
        for step in steps:
            record.ends.append(now)
            record.cpu_seconds.append(cpu)
            record.losses.append(step["loss"])


def descendants(root: int) -> list[int]:
    """All processes below ``root``."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{root}/task"):
            children = Path(f"/proc/{root}/task/{thread}/children").read_text(encoding="ascii").split()
            for child in map(int, children):
                found += [child, *descendants(child)]
    except OSError:  # it has just ended
        pass
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon")), "RssAnon: 0 kB")
    return int(line.split()[1]) * 1024


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
