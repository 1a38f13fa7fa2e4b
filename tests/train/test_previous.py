"""Results that a run replaces are there again if the run makes no step, wherever it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.spec.run import RunConfig
from shardwise.train.callbacks import RunInfo
from shardwise.train.previous import (
    HEADER,
    RESULTS,
    ReplacesPrevious,
    checkpoints_now,
    discard,
    put_back,
    results_in,
    set_aside,
)


def _content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The folder of a finished run, with a file of the user."""
    output = tmp_path / "out"
    for name in ("run.yaml", "status.json", "metrics.jsonl", "export/config.json", "checkpoints/step-00000001/x"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(f"old {name}")
    (output / "logs").mkdir()
    (output / "logs/rank-0.log").write_text("old\n")
    (output / "logs/rank-1.log").write_text("old\n")
    (output / "mine.txt").write_text("mine")
    return output


def _attempt(output: Path) -> None:
    for name in ("run.yaml", "status.json", "plan.json"):
        (output / name).write_text("new")
    (output / "logs").mkdir(exist_ok=True)
    (output / "logs/rank-0.log").write_text("new\n")


def test_metrics_that_a_script_has_saved_are_results_of_its_run(output: Path) -> None:
    (output / "all_results.json").write_text("{}")
    set_aside(output, results_in(output))
    assert sorted(path.name for path in output.iterdir()) == [".previous", "mine.txt"]
    discard(output)
    assert sorted(path.name for path in output.iterdir()) == ["mine.txt"]


def test_an_attempt_that_makes_no_step_leaves_what_was_there(output: Path) -> None:
    before = _content(output)
    set_aside(output, RESULTS)
    assert _content(output).get("mine.txt") == "mine"
    assert not (output / "export").exists()
    assert [path.name for path in checkpoints_now(output).iterdir()] == ["step-00000001"]
    _attempt(output)
    assert put_back(output)
    assert _content(output) == before | {"logs/rank-0.log": "old\nnew\n"}
    assert not put_back(output)


@pytest.mark.parametrize(("overwrite", "names"), [(True, RESULTS), (False, HEADER)])
def test_an_evaluation_alone_replaces_what_it_was_told_to_overwrite(
    output: Path, overwrite: bool, names: tuple[str, ...]
) -> None:
    set_aside(output, names)
    _attempt(output)
    callback = ReplacesPrevious()
    run = RunConfig(model="m", overwrite=overwrite)
    callback.on_train_begin(RunInfo(run, output, 0, 1, first_step=0, total_steps=9, model=None))
    callback.on_evaluate({"kind": "eval", "step": 0})
    assert put_back(output) is not overwrite
    assert (output / "run.yaml").read_text() == ("new" if overwrite else "old run.yaml")
    assert (output / "export").exists() is not overwrite


def test_a_resumed_attempt_keeps_what_it_did_not_replace(output: Path) -> None:
    before = _content(output)
    set_aside(output, HEADER)
    assert (output / "metrics.jsonl").exists()
    _attempt(output)
    (output / "profile").mkdir()
    put_back(output)
    assert (output / "profile").exists()
    assert _content(output) == before | {"logs/rank-0.log": "new\n"}


def test_with_the_first_step_the_old_results_are_gone(output: Path) -> None:
    set_aside(output, RESULTS)
    _attempt(output)
    discard(output)
    assert not put_back(output)
    assert set(_content(output)) == {"run.yaml", "status.json", "plan.json", "logs/rank-0.log", "mine.txt"}


def test_an_interrupted_move_loses_nothing(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each single move, there and back, and started again: the old results are all there."""
    before = _content(output)
    rename, left = Path.rename, 0

    class KilledError(BaseException):
        pass

    def killed_after(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KilledError
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_after)
    for moves in range(30):
        left = moves
        try:
            set_aside(output, RESULTS)
            _attempt(output)
            put_back(output)
            assert left >= 0
            break
        except KilledError:
            left = 1000
            put_back(output)
        assert {key: text for key, text in _content(output).items() if "logs" not in key} == {
            key: text for key, text in before.items() if "logs" not in key
        }
    else:
        raise AssertionError("never got through")
    assert moves > 8


def test_what_cannot_be_moved_is_refused_and_all_is_as_before(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = _content(output), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == output / "export":
            raise OSError(18, "Invalid cross-device link", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigError, match=r"cannot be moved aside \(Invalid cross-device link: .*export"):
        set_aside(output, RESULTS)
    assert _content(output) == before


def test_nothing_to_set_aside_leaves_no_trace(tmp_path: Path) -> None:
    set_aside(tmp_path, RESULTS)
    assert not list(tmp_path.iterdir())
    assert not put_back(tmp_path)
