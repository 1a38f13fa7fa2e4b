"""What a script's run is when it begins again after a failure: nothing of another run is taken for its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwise.api.session import _agree
from shardwise.launch.lock import release_all
from shardwise.launch.script import point_to
from shardwise.launch.script_worker import ScriptWorker
from shardwise.spec.run import RunConfig
from shardwise.train.context import Restart
from shardwise.train.previous import checkpoints_now, discard, is_set_aside
from tests.checkpoint.fakes import fake_checkpoint
from tests.spec.model_folder import make_folder


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """The folder of another run, with a checkpoint of its own."""
    output = tmp_path / "out"
    fake_checkpoint(output / "checkpoints", 50, {"train": {}, "identity": {}})
    (output / "plan.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    yield output
    release_all()


def _begin(output: Path, again: bool) -> tuple[RunConfig, bool]:
    """An attempt of a script that overwrites what is there."""
    tree: dict[str, Any] = {"model": str(make_folder(output.parent / "model")), "output_dir": str(output)}
    tree |= {"data": {"train": str(output.parent / "rows.jsonl")}, "device": "cpu", "overwrite": True}
    store, place = SimpleNamespace(agree=lambda make: make()), SimpleNamespace(world_size=1)
    worker = SimpleNamespace(place=place, store=store, has_worked_in=lambda folder: again and folder == output)
    run, _, found = _agree(cast(ScriptWorker, worker), tree, [], None)
    assert found is again
    return run, is_set_aside(output)


def test_an_attempt_after_one_without_a_step_begins_as_that_did(output: Path) -> None:
    for again in (False, True, True):
        run, aside = _begin(output, again)
        assert (run.resume, run.overwrite, aside) == ("no", True, True)
        assert [path.name for path in checkpoints_now(output).iterdir()] == ["step-00000050"]


def test_an_attempt_after_one_with_steps_goes_on_from_what_it_has_saved(output: Path) -> None:
    _begin(output, False)
    discard(output)  # with the first step
    (output / "logs").mkdir()
    run, aside = _begin(output, True)
    assert (run.resume, run.overwrite, aside) == ("no", False, False), "it has saved nothing yet"
    fake_checkpoint(output / "checkpoints", 3, {"train": {}, "identity": {}})
    for _ in range(2):  # the second attempt makes no step
        run, aside = _begin(output, True)
        assert (run.resume, run.overwrite, aside) == ("auto", False, False)
    assert (output / "logs").is_dir()


def test_a_worker_knows_the_folders_of_attempts_before(tmp_path: Path) -> None:
    for name in ("first", "second"):
        point_to(tmp_path, tmp_path / name)
    restart = Restart(1, 2, 0.0, "rank 1 was killed")
    place = cast(Any, None)
    again = ScriptWorker(place, tmp_path, None, restart=restart)
    assert [again.has_worked_in(tmp_path / name) for name in ("first", "second", "third")] == [True, True, False]
    assert again.folder == tmp_path / "second", "where the launcher looks for its errors"
    assert not ScriptWorker(place, tmp_path, None).has_worked_in(tmp_path / "first")
