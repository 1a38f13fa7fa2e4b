"""A background save that is under way when the run ends in another way: it is finished or told of, and never torn."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint import save_job
from shardwise.checkpoint.listing import LATEST, complete_checkpoints
from shardwise.checkpoint.save_job import damage_in
from shardwise.train.callbacks import Callback, RunInfo
from tests.fixtures import make_model, make_rows
from tests.train.runs import Result, run

pytestmark = pytest.mark.slow
POISON = 130  # the id whose embedding is infinite; in row 7 alone, and so in the second step
BASE = ["train.global_batch_size=4", "train.max_steps=4", "train.learning_rate=0.01", "dp_shard=2"]
BASE += ["data.shuffle=false", "save.strategy=steps", "save.steps=1", "save.async=true"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "llama")
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][POISON] = torch.inf
    save_file(weights, path, {"format": "pt"})
    rows = make_rows(vocab_size=POISON)
    for name, ids in (("rows", rows[6]["input_ids"]), ("poisoned", [POISON, *rows[6]["input_ids"][1:]])):
        changed = [*rows[:6], rows[6] | {"input_ids": ids}, rows[7]]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    return folder


class _SlowWrites(Callback):
    """The first write ends in the step after the one that it saves. Says whether one was under way as a step began."""

    may_stop = False

    def __init__(self, fails_at: int = 0) -> None:
        self.notes: list[bool] = []
        self._fails_at, self._is_first, self._begun = fails_at, True, threading.Event()

    def on_train_begin(self, info: RunInfo) -> None:
        write, durably = save_job.SaveJob._write_own_files, save_job._write_durably

        def slow(job: save_job.SaveJob) -> None:
            if self._is_first:
                self._is_first = False
                self._begun.wait(60)
                time.sleep(0.1)
            write(job)

        def full(path: Path, text: str) -> None:
            if path.parent.name.startswith(f".step-{self._fails_at:08d}"):
                path.write_text(text[:5])
                raise OSError(28, "No space left on device")
            durably(path, text)

        save_job.SaveJob._write_own_files = slow  # type: ignore[method-assign]
        save_job._write_durably = full

    def on_step_begin(self, step: int) -> None:
        self.notes.append(any(thread.name == "checkpoint" for thread in threading.enumerate()))
        if self.notes[-1]:
            self._begun.set()


def _slow(rank: int) -> list[Callback]:
    return [_SlowWrites()]


def _last_fails(rank: int) -> list[Callback]:
    return [_SlowWrites(fails_at=4)]


def _check(result: Result, *steps: int) -> None:
    """These checkpoints are there and whole, the last is named as the newest, and nothing else is left."""
    folder, names = result.output_dir / "checkpoints", [f"step-{step:08d}" for step in steps]
    assert [path.name for path in complete_checkpoints(folder)] == names
    assert not any(damage_in(folder / name) for name in names)
    assert {path.name for path in folder.iterdir()} == {*names, LATEST}
    assert os.readlink(folder / LATEST) == names[-1]
    assert result.status().checkpoint == f"checkpoints/{names[-1]}"


def test_a_loss_that_is_no_number_waits_for_the_save_before_it(inputs: Path, tmp_path: Path) -> None:
    data = f"data.train={inputs / 'poisoned.jsonl'}"
    result = run(inputs, tmp_path / "out", [*BASE, data], _slow)
    (message,) = set(result.errors)
    assert message.startswith("NonFiniteLossError: step 2: loss nan")
    assert "save" not in message
    assert result.callbacks[0][0] == [False, True], "a save was under way when the step began"
    _check(result, 1)


def test_a_stop_finishes_the_save_under_way_and_its_own(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, "save.steps=2"], _slow, stop_at_look=3)
    assert set(result.errors) == {""}
    assert [returned["stopped"] for returned in result.returned] == ["SIGTERM", "stop"]
    assert result.callbacks[0][0] == [False, False, True], "a save was under way when the stop came"
    _check(result, 2, 3)


def test_a_disk_that_is_full_at_the_end_of_the_last_save_is_told(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, "save.steps=2"], _last_fails)
    (message,) = set(result.errors)
    assert message.startswith("SaveError: ")
    assert "step-00000004: rank 0: could not be written (No space left on device); it needs" in message
    _check(result, 2)
    assert not (result.output_dir / "export").exists()
