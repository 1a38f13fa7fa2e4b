"""A signal to the launcher is a request that the workers answer at a step boundary."""

from __future__ import annotations

import os
import pty
import signal
import socket
import time
from pathlib import Path

import pytest

from shardwise.launch import stop
from shardwise.launch.stop import ErrorChannel, StopChannel, StopListener
from tests.launch.jobs import LAUNCHER, command, launched, prepare

# Becomes the leader of a session on the terminal that it is given, with its three streams, and then the command.
_ON_TERMINAL = """
import os, sys
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(terminal, descriptor)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def test_the_first_signal_is_noted_and_the_handlers_come_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with StopListener() as listener:
        assert (listener.signal_name, listener.at_once, listener.seconds_since()) == (None, False, 0.0)
        os.kill(os.getpid(), signal.SIGHUP)
        assert listener.signal_name is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert (listener.signal_name, listener.at_once) == ("SIGTERM", False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not listener.at_once, "a batch system may send SIGTERM twice"
        os.kill(os.getpid(), signal.SIGINT)
        assert (listener.signal_name, listener.at_once) == ("SIGTERM", True)
        assert listener.seconds_since() > 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_request_is_seen_at_the_other_end() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker, launcher = StopChannel("127.0.0.1", store.port), StopChannel("127.0.0.1", store.port)
    assert worker.requested() is None
    launcher.request("SIGINT")
    assert worker.requested() == "SIGINT"


@pytest.mark.timeout(60)
def test_a_store_that_is_gone_is_not_looked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of another machine would wait for the store of machine 0, which has ended, for minutes."""
    monkeypatch.setattr(stop, "_LAST_WORDS_SECONDS", 1.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        ErrorChannel("127.0.0.1", port).left(2)
    assert time.monotonic() - begun < 30


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_workers_stop_at_a_step_boundary(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with launched(tmp_path, "stoppable") as job:
        job.rank_pids(3)
        job.process.send_signal(number)
        assert job.wait() == code
    steps = {(tmp_path / f"stopped-{rank}").read_text() for rank in range(3)}
    status = job.status()
    assert (status["state"], status["exit_code"], [str(status["step"])]) == ("stopped", code, list(steps))
    assert job.stderr == f"stopped by {number.name}\n"


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_job_outlives_its_terminal_and_can_still_be_stopped(tmp_path: Path) -> None:
    """A session with a terminal of its own, closed while the job runs: the kernel sends SIGHUP."""
    master, slave = pty.openpty()
    prepare(tmp_path)
    arguments = ("-c", LAUNCHER, str(tmp_path), "2", "stoppable")
    with command(tmp_path, "-c", _ON_TERMINAL, os.ttyname(slave), *arguments) as job:
        os.close(slave)
        job.rank_pids(2)
        steps = tmp_path / "begun-1"
        os.close(master)

        def step() -> int:
            return job.status()["step"] or 0  # none before the first

        at_closing = step()
        job.wait_for(lambda: step() > at_closing + 5)
        assert steps.exists()
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
    assert (job.status()["state"], job.status()["exit_code"]) == ("stopped", 143)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_stop_that_does_not_end_in_time_fails(tmp_path: Path) -> None:
    with launched(tmp_path, "forever", num_ranks=2, grace_seconds=0.5) as job:
        job.rank_pids(2)
        job.process.terminate()
        assert job.wait(50) == 3, "the ranks would go on for a minute"
    assert "did not save and leave within save.grace_seconds = 0.5" in job.stderr
    assert (job.status()["state"], job.status()["exit_code"]) == ("failed", 3)
