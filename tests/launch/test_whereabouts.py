"""A rank that hangs is named, with its step, its collective and its stack."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules

from shardwise.launch.agent import Work, _ranks_here
from shardwise.launch.culprit import WorkerError, find_culprit
from shardwise.launch.forkserver import LAUNCHER_PID
from shardwise.launch.place import Nodes
from shardwise.launch.whereabouts import ask, forget, parse_stack, suspects, where_path
from shardwise.launch.worker import TIMEOUT_VARIABLE, _noted_in
from shardwise.parallel import buckets, replicate
from shardwise.train.context import note_nothing
from tests.launch.jobs import launched

WAITING = """Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f20 (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 3180 in all_reduce
  File "/site/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/shardwise/train/step.py", line 44 in sum_over_ranks
  File "/shardwise/train/step.py", line 74 in train_step
"""
SLEEPING = """Current thread 0x00007f20 (most recent call first):
  File "/data/rows.py", line 7 in read
  File "/shardwise/train/trainer.py", line 130 in _run
"""


def test_a_stack_tells_the_collective_of_the_main_thread() -> None:
    waiting, sleeping = parse_stack("step 3", WAITING), parse_stack("step 3", SLEEPING)
    assert (waiting.collective, sleeping.collective) == ("all_reduce", None)
    assert waiting.frames == ("sum_over_ranks (step.py:44)", "train_step (step.py:74)")
    assert str(sleeping) == "in step 3, outside of any collective: read (rows.py:7) < _run (trainer.py:130)"
    assert "gives no answer" in str(parse_stack("step 3", ""))
    assert suspects({0: waiting, 1: sleeping, 2: parse_stack("step 3", "")}) == [1, 2]


def _timed_out(rank: int) -> WorkerError:
    return WorkerError(1.0, rank, "RuntimeError", "Timed out waiting 5000ms for recv operation", "", 3, True)


def test_a_rank_that_only_waits_is_not_the_one_that_hangs() -> None:
    stacks = {1: parse_stack("step 3", SLEEPING), 2: parse_stack("step 3", WAITING)}
    culprit = find_culprit({0: 3}, [_timed_out(0)], 3, stacks)
    assert culprit.rank == 1
    assert culprit.message.startswith("rank 1 hangs in step 3, outside of any collective: read (rows.py:7)")
    assert find_culprit({0: 3}, [_timed_out(0)], 3, {2: stacks[2]}).rank == 0


def test_a_worker_that_keeps_no_words_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert ask(tmp_path, {0: 1}) == {}


@pytest.mark.parametrize(
    ("frame", "collective"),
    [
        ('shardwise/parallel/buckets.py", line 56 in finish', "all_reduce"),
        ('shardwise/parallel/replicate.py", line 58 in _sum_in_buckets', "all_reduce"),
        ('torch/distributed/pipelining/schedules.py", line 683 in _wait_batch_p2p', "batch_isend_irecv"),
        ('data/rows.py", line 7 in read\n  File "shardwise/parallel/buckets.py", line 56 in finish', None),
    ],
)
def test_a_wait_for_what_was_begun_before_is_a_collective(frame: str, collective: str | None) -> None:
    """``Work.wait`` is no Python function, so that its caller is the innermost frame."""
    assert parse_stack("step 3", f'Current thread 0x00007f20:\n  File "{frame}\n').collective == collective


@pytest.mark.parametrize(
    ("module", "name"),
    [(buckets.ReplicaSums, "finish"), (replicate, "_sum_in_buckets"), (schedules, "_wait_batch_p2p")],
)
def test_the_functions_that_wait_are_where_they_are_looked_for(module: object, name: str) -> None:
    function = getattr(module, name)
    file = Path(inspect.getsourcefile(function) or "").name
    assert ".wait()" in inspect.getsource(function)
    assert parse_stack("step 3", f'Current thread 0x00007f20:\n  File "/{file}", line 1 in {name}\n').collective


def test_a_file_that_has_gone_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    where_path(tmp_path, 0).write_text("step 3")
    monkeypatch.setattr("shardwise.launch.whereabouts.os.kill", lambda pid, number: forget(tmp_path, [0]))
    assert ask(tmp_path, {0: 1})[0].frames == ()


def test_words_of_other_machines_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in range(4):
        where_path(tmp_path, rank).write_text("step 3")
    work = Work(tmp_path, "a:b", 4, Nodes(2, 1, "h:1"))
    forget(tmp_path, _ranks_here(work, 2))
    assert [where_path(tmp_path, rank).exists() for rank in range(4)] == [True, True, False, False]


def test_a_worker_goes_on_where_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PID, "1")
    assert _noted_in(tmp_path, 0) is note_nothing, "there is no logs/ to keep words in"
    monkeypatch.delenv(LAUNCHER_PID)
    (tmp_path / "logs").mkdir()
    assert _noted_in(tmp_path, 0) is note_nothing, "another launcher does not ask"


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_65b_a_rank_that_hangs_is_named_with_step_and_stack(tmp_path: Path) -> None:
    with launched(tmp_path, "rank_1_sleeps", **{TIMEOUT_VARIABLE: "4"}) as job:
        assert job.wait() == 3
    message = job.status()["error"]
    assert message.startswith("rank 1 hangs in step 3, outside of any collective: rank_1_sleeps (targets.py:")
    assert "waited for it until the limit" in message
    assert job.status()["rank"] == 1
    assert message in job.stderr
    assert "in rank_1_sleeps" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert not list((tmp_path / "logs").glob(".where-*"))
