"""Whole jobs: how they end, who is named, and that nothing is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shardwise.train.compiler_cache import compiler_folder
from tests.launch.jobs import LIMIT_SECONDS, launched, seconds_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def test_two_jobs_at_once_end_well_and_do_not_meet(tmp_path: Path) -> None:
    with launched(tmp_path / "a", "normal") as first, launched(tmp_path / "b", "normal", num_ranks=2) as second:
        jobs = ((first, 3), (second, 2))
        assert [job.wait() for job, _ in jobs] == [0, 0], first.stderr + second.stderr
    for job, num_ranks in jobs:
        assert (job.status()["state"], job.status()["exit_code"]) == ("done", 0)
        assert job.stdout == "printed by rank 0\n"
        assert sorted(job.stderr.splitlines()) == ["a line for the terminal", "complained by rank 0"]
        for rank in range(num_ranks):
            log = (job.output_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
            assert sorted(log) == sorted(f"{what} by rank {rank}" for what in ("printed", "complained", "written"))


def test_a_killed_rank_is_named_and_takes_all_down(tmp_path: Path) -> None:
    with launched(tmp_path, "forever") as job:
        os.kill(job.rank_pids(3)[1], signal.SIGKILL)
        assert job.wait(50) == 3, "the others would go on for a minute"
    assert "rank 1 was killed by SIGKILL" in job.stderr
    assert "Traceback" not in job.stderr
    status = job.status()
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 3, 1)
    assert "rank 1 was killed by SIGKILL" in status["error"]


@pytest.mark.parametrize("target", ["rank_1_raises", "rank_1_raises_while_others_wait"])
def test_the_rank_that_raised_is_named_not_those_that_complain(tmp_path: Path, target: str) -> None:
    with launched(tmp_path, target) as job:
        assert job.wait() == 3
    assert job.stderr.startswith("rank 1 failed: ValueError: row 17 is not a row\n")
    assert job.stderr.count("row 17") == 1
    assert "Traceback" not in job.stderr
    assert (job.status()["state"], job.status()["rank"]) == ("failed", 1)
    assert "Traceback" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_run_that_fails_leaves_no_compiled_code(tmp_path: Path) -> None:
    with launched(tmp_path, "rank_1_raises_with_compiled_code") as job:
        assert job.wait() == 3
    assert "rank 1 failed: ValueError" in job.stderr
    assert not compiler_folder(tmp_path).exists()


def test_a_refusal_of_all_ranks_is_one_message(tmp_path: Path) -> None:
    with launched(tmp_path, "all_refuse") as job:
        assert job.wait() == 2
    assert job.stderr == "model.safetensors: holds no lm_head.weight. Take the whole folder.\n"
    assert job.stdout == ""
    assert (job.status()["state"], job.status()["exit_code"]) == ("refused", 2)


def test_the_cause_is_said_also_where_the_disk_takes_nothing_more(tmp_path: Path) -> None:
    with launched(tmp_path, "disk_full") as job:
        assert job.wait() == 3
    assert job.stderr.startswith("rank 1 failed: OSError: [Errno 28] No space left on device: 'model.safetensors'\n")
    assert "status.json could not be written (Is a directory)" in job.stderr
    assert "Traceback" not in job.stderr


def test_a_rank_that_leaves_early_has_failed_also_with_status_0(tmp_path: Path) -> None:
    with launched(tmp_path, "rank_1_leaves_with_status_0") as job:
        assert job.wait() == 3
    assert "rank 1 left with status 0 before its work was done" in job.stderr


def test_the_status_of_sys_exit_is_passed_on(tmp_path: Path) -> None:
    with launched(tmp_path, "exit_with_7", num_ranks=2) as job:
        assert job.wait() == 7
    assert (job.status()["state"], job.status()["exit_code"]) == ("failed", 7)


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with launched(tmp_path, "forever") as job:
        ranks = set(job.rank_pids(3))
        assert ranks < job.pids()
        job.process.kill()
        assert job.process.wait(LIMIT_SECONDS) == -signal.SIGKILL
        seconds_until_gone(job)  # in less than the minute that they would go on for
