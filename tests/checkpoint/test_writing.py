"""Files that are summed up as they are written, and a pace that leaves the cores to the steps."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.checkpoint import writing
from shardwise.checkpoint.listing import record_of
from shardwise.checkpoint.writing import Pace, SummedFiles


class _Clock:
    """Time that passes by work and by rests alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.worked = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: self.worked)
        monkeypatch.setattr(writing, "time", clock)

    def pace(self, num_bytes: int, num_cores: int = 1, within: float = float("inf")) -> Pace:
        pace = Pace(num_bytes, num_cores, within)

        def wait(seconds: float) -> None:
            self.now += seconds

        pace._hurried.wait = wait  # type: ignore[method-assign, assignment]
        pace.begin()
        return pace

    def work(self, seconds: float, others: float = 0.0) -> None:
        self.now, self.worked = self.now + seconds + others, self.worked + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


@pytest.mark.parametrize(("num_cores", "seconds"), [(1, 10 / 0.03), (4, 10 / 0.12), (64, 10)])
def test_a_save_takes_its_share_of_the_cores_and_no_more(clock: _Clock, num_cores: int, seconds: float) -> None:
    pace = clock.pace(100, num_cores)
    for _ in range(10):
        clock.work(1.0)
        pace.rest(10)
    assert clock.now == pytest.approx(seconds)


def test_waiting_for_a_disk_or_a_core_counts_as_rest(clock: _Clock) -> None:
    pace = clock.pace(100)
    for _ in range(10):
        clock.work(0.3, others=20)
        pace.rest(10)
    assert clock.now == pytest.approx(10 * 20.3)


@pytest.mark.parametrize("num_bytes", [100, 150, 70])
def test_a_save_is_through_when_it_is_due(clock: _Clock, num_bytes: int) -> None:
    """Also where there is less or more to write than was said."""
    pace = clock.pace(num_bytes, within=60)
    for _ in range(10):
        clock.work(1.0)
        pace.rest(10)
    assert 30 <= clock.now <= 60 + 10


def test_a_save_that_is_waited_for_rests_no_more() -> None:
    pace, begun, done = Pace(2**30, 1), threading.Event(), threading.Event()

    def write() -> None:
        pace.begin()
        pace._had_worked -= 1000  # as after long work: hours of rest
        begun.set()
        pace.rest(1)
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert begun.wait(20)
    assert not done.wait(0.2)
    pace.hurry()
    assert done.wait(20)


def test_the_checksum_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PIECE_BYTES", 1000)
    pace, rests = Pace(0, 1), []
    monkeypatch.setattr(pace, "rest", rests.append)
    files, path = SummedFiles(pace), tmp_path / "part"
    with files.create_stream(path, "wb") as stream:
        torch.save(torch.arange(1000), stream)
        stream.write(b"")
        stream.write(memoryview(torch.arange(300).numpy()))
        assert stream.tell() > 10_400
    record = record_of(path)
    assert files.checksums == {"part": record.crc32}
    assert sum(rests) == record.bytes
    assert max(rests) == 1000


def test_a_file_that_could_not_be_written_has_no_checksum(tmp_path: Path) -> None:
    files = SummedFiles()

    def write() -> None:
        with files.create_stream(tmp_path / "part", "wb") as stream:
            stream.write(b"begun")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write()
    assert not files.checksums
