"""The choice of the rank to name, from exit codes and errors."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.launch.culprit import (
    WorkerError,
    error_path,
    find_culprit,
    is_connection_error,
    read_deaths,
    read_errors,
    remove_errors,
    write_deaths,
    write_error,
)


def _error(rank: int, time: float, kind: str = "ValueError", **changes: object) -> WorkerError:
    values: dict[str, object] = {
        "time": time,
        "rank": rank,
        "type": kind,
        "message": f"words of {rank}",
        "traceback": "",
        "exit_code": 3,
        "connection_error": kind == "RuntimeError",
    }
    return WorkerError(**(values | changes))  # type: ignore[arg-type]


def test_a_kill_comes_before_every_error() -> None:
    errors = [_error(0, 1.0), _error(2, 2.0, "RuntimeError")]
    culprit = find_culprit({0: 3, 1: -signal.SIGKILL}, errors, 3)
    assert (culprit.rank, culprit.exit_code, culprit.refused) == (1, 3, False)
    assert culprit.message.startswith("rank 1 was killed by SIGKILL")


def test_the_earliest_error_that_is_no_complaint_is_named() -> None:
    errors = [_error(0, 1.0, "RuntimeError"), _error(2, 3.0), _error(1, 2.0)]
    assert find_culprit({0: 3, 1: 3, 2: 3}, errors, 3).message == "rank 1 failed: ValueError: words of 1"


@pytest.mark.parametrize("kind", ["SaveError", "NonFiniteLossError"])
def test_what_another_attempt_gives_again_may_not_pass(kind: str) -> None:
    for refused in (False, True):
        culprit = find_culprit({0: 3}, [_error(0, 1.0, kind, refused=refused)], 1)
        assert (culprit.may_pass, culprit.refused, culprit.exit_code) == (False, False, 3)
    assert find_culprit({0: 3}, [_error(0, 1.0, "LaunchError", refused=True)], 1).may_pass


def test_an_abort_is_named_only_if_nobody_has_said_more() -> None:
    aborted = {0: -signal.SIGABRT, 1: 3}
    assert find_culprit(aborted, [_error(1, 1.0)], 2).rank == 1
    assert find_culprit(aborted, [_error(1, 1.0, "RuntimeError")], 2).message == "rank 0 was killed by SIGABRT"


def test_a_silent_exit_comes_before_complaints() -> None:
    culprit = find_culprit({0: 3, 1: 0}, [_error(0, 1.0, "RuntimeError")], 2)
    assert culprit.message == "rank 1 left with status 0 before its work was done"


def test_with_complaints_alone_the_silent_ranks_are_named_too() -> None:
    culprit = find_culprit({0: 3}, [_error(0, 1.0, "RuntimeError")], 3)
    assert culprit.rank == 0
    assert "no word from rank 1, 2" in culprit.message


def test_nothing_known_is_said_so() -> None:
    culprit = find_culprit({}, [], 2)
    assert (culprit.rank, culprit.exit_code) == (None, 3)


def test_a_refusal_stands_for_itself() -> None:
    refusals = [_error(rank, float(rank), "CheckpointError", exit_code=2, refused=True) for rank in (1, 0)]
    culprit = find_culprit({0: 2, 1: 2}, refusals, 2)
    assert (culprit.message, culprit.exit_code, culprit.refused) == ("words of 0", 2, True)


@pytest.mark.parametrize(("text", "message"), [("7", "left with status 7"), ("bye", "left with status 7: bye")])
def test_sys_exit_keeps_its_status(text: str, message: str) -> None:
    culprit = find_culprit({0: 7}, [_error(0, 1.0, "SystemExit", message=text, exit_code=7)], 1)
    assert (culprit.message, culprit.exit_code) == (f"rank 0 {message}", 7)


def test_a_long_message_is_cut() -> None:
    assert len(find_culprit({0: 3}, [_error(0, 1.0, message="x" * 9000)], 1).message) < 2100


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (dist.DistBackendError("anything"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_complaints_about_a_peer_are_told_from_errors(error: Exception, expected: bool) -> None:
    assert is_connection_error(error) is expected


def test_the_error_below_another_one_counts() -> None:
    try:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as cause:
            raise ValueError("the step failed") from cause
    except ValueError as error:
        assert is_connection_error(error)


def test_errors_are_written_and_read_and_torn_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    error = _error(2, 1.5, message="行 17")
    write_error(tmp_path, error)
    error_path(tmp_path, 0).write_text('{"time": 1.0, "ra')
    assert read_errors(tmp_path, 3) == [error]


def test_the_deaths_that_another_machine_saw_are_read_and_those_of_an_earlier_run_removed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert read_deaths(tmp_path) == []
    write_deaths(tmp_path, 1, {3: -9, 2: 1})
    write_deaths(tmp_path, 2, {5: -6})
    assert read_deaths(tmp_path) == [{3: -9, 2: 1}, {5: -6}]
    remove_errors(tmp_path, 1, 6)
    assert read_deaths(tmp_path) != []
    remove_errors(tmp_path, 0, 6)
    assert read_deaths(tmp_path) == []
