"""Checkpoints in whole runs: in the background, with too little room, with a rank that cannot write, with damage."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint import save_job
from shardwise.checkpoint.listing import BEST, LATEST, MANIFEST_FILE, complete_checkpoints, read_manifest
from shardwise.train.callbacks import Callback, RunInfo
from tests.train.runs import Result, make_inputs, run

pytestmark = pytest.mark.slow
STEPS = 6
BASE = ["train.global_batch_size=4", f"train.max_steps={STEPS}", "train.learning_rate=0.01", "dp_shard=2"]
FIRST_SAVE = 2
SAVING = ["save.strategy=steps", f"save.steps={FIRST_SAVE}", "save.keep=2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def plain(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Saved step by step, with the best one kept."""
    evaluation = [f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=steps", "eval.steps=2", "save.best=eval_loss"]
    result = run(inputs, tmp_path_factory.mktemp("plain") / "out", [*BASE, *SAVING, *evaluation])
    assert set(result.errors) == {""}
    return result


def _weights(result: Result) -> bytes:
    return (result.output_dir / "export" / "model.safetensors").read_bytes()


def _losses(result: Result) -> list[float]:
    return [line["loss"] for line in result.metrics()]


def test_links_name_the_newest_and_the_best(plain: Result) -> None:
    folder = plain.output_dir / "checkpoints"
    best = min(plain.metrics("eval"), key=lambda line: line["eval_loss"])
    assert os.readlink(folder / LATEST) == f"step-{STEPS:08d}"
    assert os.readlink(folder / BEST) == f"step-{best['step']:08d}"
    assert (folder / BEST / "config.json").is_file()


class _SlowWrites(Callback):
    """The first write ends after the step that follows the one that it saves; notes when checkpoints are told of."""

    may_stop = False

    def __init__(self) -> None:
        self.notes: list[tuple[int, str]] = []
        self._step, self._has_gone_on = 0, threading.Event()

    def on_train_begin(self, info: RunInfo) -> None:
        write = save_job.SaveJob._write_own_files

        def slow(job: save_job.SaveJob) -> None:
            self._has_gone_on.wait(60)
            write(job)

        save_job.SaveJob._write_own_files = slow  # type: ignore[method-assign]

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step = step
        if step > FIRST_SAVE:
            self._has_gone_on.set()

    def on_save(self, path: Path) -> None:
        self.notes.append((self._step, path.name))


def _slow_writes(rank: int) -> list[Callback]:
    return [_SlowWrites()]


def test_a_background_save_holds_the_state_of_its_own_step(inputs: Path, plain: Result, tmp_path: Path) -> None:
    """Steps change the weights while it is written: what a run goes on from it with must not know them."""
    overrides = [*BASE, *SAVING, "save.async=true", "save.keep=9"]
    result = run(inputs, tmp_path / "out", overrides, _slow_writes)
    assert set(result.errors) == {""}
    assert _weights(result) == _weights(plain)
    told = result.callbacks[0][0]
    assert [name for _, name in told] == [f"step-{step:08d}" for step in (2, 4, 6)]
    assert told[0][0] > FIRST_SAVE, "steps went on while the first was written"
    assert result.status().checkpoint == f"checkpoints/step-{STEPS:08d}"
    for step in (4, 6):
        shutil.rmtree(result.output_dir / "checkpoints" / f"step-{step:08d}")
    again = run(inputs, result.output_dir, [*BASE, *SAVING, "save.keep=9", "resume=auto"])
    assert _losses(again) == _losses(plain)
    assert _weights(again) == _weights(plain)


def _rank_1_cannot_write(rank: int) -> list[Callback]:
    def fail(job: save_job.SaveJob) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        save_job.SaveJob._write_own_files = fail  # type: ignore[method-assign]
    return []


@pytest.mark.parametrize("background", ["false", "true"])
def test_65e_a_rank_that_cannot_write_ends_all_by_name(inputs: Path, tmp_path: Path, background: str) -> None:
    overrides = [*BASE, *SAVING, f"save.async={background}"]
    result = run(inputs, tmp_path / "out", overrides, _rank_1_cannot_write)
    (message,) = set(result.errors)
    assert message.startswith("SaveError: ")
    assert "step-00000002: rank 1: could not be written (No space left on device); it needs" in message
    assert "are free there" in message
    assert complete_checkpoints(result.output_dir / "checkpoints") == []
    assert list((result.output_dir / "checkpoints").iterdir()) == []
    told_at = result.metrics()[-1]["step"]
    assert told_at == 2 if background == "false" else told_at in (3, 4)  # at the next step that begins after it


def _without_room(rank: int) -> list[Callback]:
    shutil.disk_usage = lambda folder: SimpleNamespace(free=1000)  # type: ignore[assignment,misc]
    return []


class _RoomGoes(Callback):
    """The disk fills up once the run has begun."""

    may_stop = False

    def on_train_begin(self, info: RunInfo) -> None:
        _without_room(info.rank)


def _room_goes(rank: int) -> list[Callback]:
    return [_RoomGoes()]


def test_55_too_little_room_is_met_before_a_save_with_both_numbers(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, *SAVING], _room_goes)
    (message,) = set(result.errors)
    assert message.startswith("SaveError: the checkpoint of step 2: needs ")
    assert "1000 B are free" in message
    assert not (result.output_dir / "checkpoints").exists()


def test_a_damaged_checkpoint_is_passed_over_by_its_content(inputs: Path, plain: Result, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(plain.output_dir, output, symlinks=True)
    newest = complete_checkpoints(output / "checkpoints")[-1]
    largest = max(read_manifest(newest)[1].items(), key=lambda item: item[1].bytes)[0]
    with (newest / largest).open("r+b") as file:
        file.seek(2000)
        byte = file.read(1)
        file.seek(2000)
        file.write(bytes([byte[0] ^ 1]))
    refused = run(inputs, output, [*BASE, *SAVING, f"resume={newest}"])
    assert "a damaged checkpoint" in refused.errors[0]
    assert largest in refused.errors[0]
    result = run(inputs, output, [*BASE, *SAVING, "resume=auto"])
    assert set(result.errors) == {""}
    assert f"passed over {newest.name}: the content of its {largest} is not what was written" in result.terminal
    assert "after step 4" in result.terminal
    assert _weights(result) == _weights(plain)
    assert json.loads((newest / "state.json").read_text())["train"]["step"] == STEPS
    assert (output / "checkpoints" / "superseded" / newest.name).is_dir()


def test_a_checkpoint_without_its_list_is_taken_where_it_is_named(inputs: Path, plain: Result, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(plain.output_dir, output, symlinks=True)
    older = complete_checkpoints(output / "checkpoints")[-2]
    (older / MANIFEST_FILE).unlink()
    result = run(inputs, output, [*BASE, *SAVING, f"resume={older}"])
    assert set(result.errors) == {""}
    assert f"{older.name} has no {MANIFEST_FILE}: its files are as long as its index says; what they" in result.terminal
    assert "after step 4" in result.terminal
    assert _weights(result) == _weights(plain)


def test_a_run_without_room_is_refused_before_its_first_step(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, *SAVING], _without_room)
    (message,) = set(result.errors)
    assert message.startswith("CheckpointError: output_dir = ")
    assert "for up to 3 checkpoints of " in message
    assert "1000 B are free there" in message
    assert not (result.output_dir / "metrics.jsonl").exists()
