"""The worker's entry, started by torch's own launcher: rank and store come from the environment alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.launch.forkserver import LAUNCHER_PID
from shardwise.launch.worker import _foreign_restart
from tests.launch.jobs import Job, command, prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def _torchrun(output_dir: Path, target: str) -> Job:
    prepare(output_dir)
    (output_dir / "logs").mkdir()
    for rank in (0, 1, 7):  # of an earlier run, which had more ranks
        (output_dir / "logs" / f"error-rank-{rank}.json").write_text("{}")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    worker = ("-m", "shardwise.launch.worker", str(output_dir), f"tests.launch.targets:{target}")
    with command(output_dir, *torchrun, *where, *worker) as job:
        job.wait()
    return job


def test_a_job_of_torchrun_ends_well(tmp_path: Path) -> None:
    job = _torchrun(tmp_path, "normal")
    assert job.process.returncode == 0, job.stderr
    assert (job.status()["state"], job.status()["exit_code"]) == ("done", 0)
    assert not list(tmp_path.glob("logs/error-rank-*"))
    assert "printed by rank 0" in job.stdout
    assert "printed by rank 1" not in job.stdout
    assert "written by rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_rank_that_raises_fails_a_job_of_torchrun(tmp_path: Path) -> None:
    job = _torchrun(tmp_path, "rank_1_raises_while_others_wait")
    assert job.process.returncode == 1
    assert "row 17 is not a row" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert "row 17" in (tmp_path / "logs" / "error-rank-1.json").read_text()
    assert not (tmp_path / "logs" / "error-rank-7.json").exists()
    status = job.status()
    assert (status["state"], status["rank"], status["error"]) == ("failed", 1, "row 17 is not a row")


def test_a_worker_that_torchrun_starts_again_knows_it() -> None:
    again = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    restart = _foreign_restart(again)
    assert restart is not None
    assert (restart.number, restart.allowed) == (2, 3)
    assert _foreign_restart(again | {"TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert _foreign_restart(again | {LAUNCHER_PID: "7"}) is None, "our launcher tells it in its own way"
