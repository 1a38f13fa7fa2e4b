"""``status.json`` is written seldom, and is right whenever a run has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.spec.run import RunConfig
from shardwise.train import status as status_module
from shardwise.train.callbacks import RunInfo
from shardwise.train.context import Restart
from shardwise.train.metrics import MetricsFile, last_step
from shardwise.train.restarts import TellsRestart
from shardwise.train.status import Status, StatusFile, finish_status, read_status, update_status, write_status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless its one element is changed."""
    now = [100.0]
    monkeypatch.setattr(status_module.time, "monotonic", lambda: now[0])
    return now


def _info(folder: Path, first_step: int = 0) -> RunInfo:
    config = RunConfig.model_validate({"model": "m"})
    return RunInfo(config, folder, rank=0, world_size=1, first_step=first_step, total_steps=9, model=None)


def _step(folder: Path) -> int | None:
    status = read_status(folder)
    assert status is not None
    return status.step


def test_a_restart_is_written_before_its_first_step(tmp_path: Path) -> None:
    teller = TellsRestart(Restart(2, 3, 0.0, "rank 1 was killed"), lambda text: None)
    write_status(tmp_path, Status(step=4))
    teller.on_train_begin(_info(tmp_path, 4))
    assert read_status(tmp_path) == Status(step=4, restarts=2)
    teller.on_step_end(5, {})
    status = read_status(tmp_path)
    assert status is not None
    assert status.restarts == 2
    assert status.restart_seconds


def test_steps_are_written_once_a_second_and_all_else_at_once(tmp_path: Path, clock: list[float]) -> None:
    keeper = StatusFile()
    keeper.on_train_begin(_info(tmp_path))
    assert _step(tmp_path) == 0
    keeper.on_step_end(1, {})
    assert _step(tmp_path) == 1  # the first at once: from now on the metrics are those of this start
    keeper.on_step_end(2, {})
    assert _step(tmp_path) == 1
    clock[0] += 1.0
    keeper.on_step_end(2, {})
    assert _step(tmp_path) == 2
    keeper.on_step_end(3, {})
    keeper.on_save(tmp_path / "checkpoints" / "step-00000003")
    assert read_status(tmp_path) == Status(step=3, checkpoint="checkpoints/step-00000003", first_step=0)
    keeper.on_step_end(4, {})
    keeper.on_train_end("enough")
    assert read_status(tmp_path) == Status(
        step=4, checkpoint="checkpoints/step-00000003", reason="enough", first_step=0, ended_at=4
    )


def test_a_failure_that_another_rank_told_is_not_overwritten(tmp_path: Path, clock: list[float]) -> None:
    keeper = StatusFile()
    keeper.on_train_begin(_info(tmp_path))
    update_status(tmp_path, state="failed", rank=1, error="no luck")
    clock[0] += 2.0
    keeper.on_step_end(5, {})
    assert read_status(tmp_path) == Status(state="failed", rank=1, error="no luck", step=5, first_step=0)


def test_after_a_kill_the_metrics_tell_the_last_step(tmp_path: Path, clock: list[float]) -> None:
    metrics, keeper = MetricsFile(), StatusFile()
    for callback in (metrics, keeper):
        callback.on_train_begin(_info(tmp_path))
    for step in range(1, 6):
        line = {"kind": "train", "step": step, "row_hashes": ["0" * 16] * 50}
        metrics.on_step_end(step, line)
        keeper.on_step_end(step, line)
    metrics.on_evaluate({"kind": "eval", "step": 5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "lo')  # killed while it wrote
    assert _step(tmp_path) == 1  # the first step is written at once
    assert finish_status(tmp_path, state="failed", exit_code=3).step == 5


def test_metrics_of_an_earlier_start_say_nothing_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 50}\n')
    write_status(tmp_path, Status())
    assert finish_status(tmp_path, state="failed").step is None  # it failed before it had read its checkpoint
    write_status(tmp_path, Status())
    metrics, keeper = MetricsFile(), StatusFile("checkpoints/step-00000040")
    for callback in (metrics, keeper):
        callback.on_train_begin(_info(tmp_path, first_step=40))
    assert finish_status(tmp_path, state="failed").step == 40


def test_the_last_step_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    line = {"kind": "train", "step": 0, "row_hashes": ["0" * 16] * 1000}
    text = "".join(json.dumps(line | {"step": step}) + "\n" for step in range(1, 101))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert len(text) > 2**20
    assert last_step(tmp_path) == 100


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile()
    metrics.on_train_begin(_info(tmp_path))
    metrics.on_evaluate({"kind": "eval", "step": 1, "eval_loss": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["eval_loss"] is None
