"""A rank that hangs is named, with its step, its collective and its stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.launch.culprit import WorkerError, find_culprit
from shardwise.launch.whereabouts import ask, parse_stack, suspects
from shardwise.launch.worker import TIMEOUT_VARIABLE
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


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_65b_a_rank_that_hangs_is_named_with_step_and_stack(tmp_path: Path) -> None:
    with launched(tmp_path, "rank_1_sleeps", **{TIMEOUT_VARIABLE: "2"}) as job:
        assert job.wait() == 3
    message = job.status()["error"]
    assert message.startswith("rank 1 hangs in step 3, outside of any collective: rank_1_sleeps (targets.py:")
    assert "waited for it until the limit" in message
    assert job.status()["rank"] == 1
    assert message in job.stderr
    assert "in rank_1_sleeps" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert not list((tmp_path / "logs").glob(".where-*"))
