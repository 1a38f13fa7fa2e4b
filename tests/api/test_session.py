"""What a script's run is when it begins again after a failure: nothing of another run is taken for its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwise.api.session import _agree
from shardwise.front import resolve
from shardwise.front.resolve import prepare
from shardwise.launch.lock import release_all
from shardwise.launch.output import write_run
from shardwise.launch.script import point_to
from shardwise.launch.script_worker import ScriptWorker
from shardwise.spec.run import RunConfig
from shardwise.train.context import Restart
from shardwise.train.previous import checkpoints_now, discard, is_set_aside
from shardwise.train.status import update_status
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


def _begin(output: Path, again: bool, more: dict[str, Any] | None = None, left: bool = False) -> tuple[RunConfig, bool]:
    """An attempt of a script that overwrites what is there."""
    tree: dict[str, Any] = {"model": str(make_folder(output.parent / "model")), "output_dir": str(output)}
    tree |= {"data": {"train": str(output.parent / "rows.jsonl")}, "device": "cpu", "overwrite": True} | (more or {})
    store, place = SimpleNamespace(agree=lambda make: make()), SimpleNamespace(world_size=1)
    worker = SimpleNamespace(place=place, store=store, has_worked_in=lambda folder: again and folder == output)
    worker.begin, worker.has_left = lambda folder: None, lambda folder: left
    run, _, found, _ = _agree(cast(ScriptWorker, worker), tree, [], None)
    assert found is again
    return run, is_set_aside(output)


def test_an_attempt_after_one_without_a_step_begins_as_that_did(output: Path) -> None:
    for again in (False, True, True):
        run, aside = _begin(output, again)
        assert (run.resume, run.overwrite, aside) == ("no", True, True)
        assert [path.name for path in checkpoints_now(output).iterdir()] == ["step-00000050"]


def test_an_attempt_after_one_that_a_callback_had_ended_knows_where(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it fails once more before it is there; not in a job of its own, and not before a step was made."""
    tree: dict[str, Any] = {"model": str(make_folder(output.parent / "model")), "output_dir": str(output)}
    tree |= {"data": {"train": str(output.parent / "rows.jsonl")}, "device": "cpu", "overwrite": True}
    store, place = SimpleNamespace(agree=lambda make: make()), SimpleNamespace(world_size=1)
    monkeypatch.setattr(resolve, "check_resume", lambda *arguments: None)
    found = []
    for again in (False, True, True, False):
        worker = SimpleNamespace(place=place, store=store, has_worked_in=lambda folder, again=again: again)
        worker.begin, worker.has_left = lambda folder: None, lambda folder: False
        found.append(_agree(cast(ScriptWorker, worker), tree, [], None)[3])
        discard(output)  # with the first step
        if len(found) == 1:
            update_status(output, step=4, ended_at=4, reason="good enough")
    assert found == [None, (4, "good enough"), (4, "good enough"), None]


def test_an_attempt_in_a_new_folder_is_told_of(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for left in (False, True):
        _begin(output, False, left=left)
        assert capsys.readouterr().err.count("is a new folder, so this attempt begins anew") == left


def test_an_attempt_after_one_with_steps_goes_on_from_what_it_has_saved(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "check_resume", lambda *arguments: None)
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
    place, first = cast(Any, None), ScriptWorker(cast(Any, None), tmp_path, None)
    for name in ("first", "second"):
        assert not first.has_worked_in(tmp_path / name)
        assert not first.has_left(tmp_path / name)
        first.begin(tmp_path / name)
        point_to(tmp_path, tmp_path / name)
    restart = Restart(1, 2, 0.0, "rank 1 was killed")
    again = ScriptWorker(place, tmp_path, None, restart=restart)
    assert [again.has_worked_in(tmp_path / name) for name in ("first", "second", "third")] == [True, True, False]
    assert again.folder == tmp_path / "second", "where the launcher looks for its errors"
    assert [again.has_left(tmp_path / name) for name in ("first", "third")] == [False, True]
    again.begin(tmp_path / "first")
    assert not again.has_left(tmp_path / "third"), "it has gone on elsewhere before"


def test_a_second_trainer_in_a_folder_does_not_take_over_what_the_first_has_saved(tmp_path: Path) -> None:
    def worker(attempt: int) -> ScriptWorker:
        restart = Restart(attempt, 3, 0.0, "rank 1 was killed") if attempt else None
        return ScriptWorker(cast(Any, None), tmp_path, None, restart=restart)

    worker(0).begin(tmp_path / "out")
    second = worker(1)
    assert second.has_worked_in(tmp_path / "out"), "the first Trainer goes on"
    second.begin(tmp_path / "out")
    assert not second.has_worked_in(tmp_path / "out"), "the second one of the same attempt does not"
    second.begin(tmp_path / "out")
    assert not worker(2).has_worked_in(tmp_path / "out"), "the first one's results have been replaced"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rank_that_is_killed_while_it_begins_has_begun(output: Path, overwrite: bool) -> None:
    """Before anything is written that a later attempt would refuse, and after what lay there was set aside."""
    told: list[tuple[bool, bool]] = []
    tree: dict[str, Any] = {"model": str(make_folder(output.parent / "model")), "device": "cpu", "devices": 1}
    tree |= {"data": {"train": str(output.parent / "rows.jsonl")}, "overwrite": overwrite}
    tree |= {"output_dir": str(output if overwrite else output.parent / "new")}
    run, plan = prepare(tree)
    folder = Path(run.output_dir)
    write_run(run, plan, begin=lambda: told.append((is_set_aside(folder), (folder / "run.yaml").exists())))
    assert told == [(overwrite, False)]


def test_a_checkpoint_that_the_run_has_removed_since_is_not_asked_for(output: Path) -> None:
    """The script resumes from one of its own folder, which rotation has taken away before the failure."""
    (output / "run.yaml").write_text("{}")
    fake_checkpoint(output / "checkpoints", 60, {"train": {}, "identity": {}})
    checked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "check_resume", lambda run, plan, folder: checked.append(run.resume))
        run, _ = _begin(output, True, {"resume": str(output / "checkpoints" / "step-00000040"), "overwrite": False})
    assert (run.resume, checked) == ("auto", ["auto"])
