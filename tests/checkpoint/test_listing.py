"""Which folders are checkpoints, which are passed over and why, and what rotation leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.checkpoint.listing import BEST, LATEST, PIN_FILE, complete_checkpoints, fault_in, passed_over
from shardwise.checkpoint.shelf import link, rotate, set_aside, sweep
from tests.checkpoint.fakes import fake_checkpoint


def _names(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: (path / "state.json").unlink(), "it has no state.json"),
        (lambda path: (path / "files.json").unlink(), "it has no files.json"),
        (lambda path: (path / "files.json").write_text("{"), "its files.json is damaged"),
        (lambda path: (path / "__0_0.distcp").unlink(), "it has no __0_0.distcp"),
        (lambda path: os.truncate(path / "__0_0.distcp", 1), "its __0_0.distcp has 1 bytes of 2"),
        (lambda path: (path / "state.json").write_text('{"best": 2.0}'), "content of its state.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    tmp_path: Path, harm: Callable[[Path], object], reason: str
) -> None:
    fake_checkpoint(tmp_path, 3, {"best": 1.0})
    newest = fake_checkpoint(tmp_path, 6, {"best": 1.0})
    harm(newest)
    assert _names(tmp_path) == ["step-00000003"]
    (note,) = passed_over(tmp_path, tmp_path / "step-00000003")
    assert note.startswith("step-00000006: ")
    assert reason in note


def test_foreign_and_unfinished_folders_are_passed_over(tmp_path: Path) -> None:
    old = fake_checkpoint(tmp_path, 900, {})
    for step in (9_900, 10_000):
        fake_checkpoint(tmp_path, step, {})
    fake_checkpoint(tmp_path / "other", 5, {}).rename(tmp_path / "step-00020000")
    (tmp_path / ".step-00010005.draft").mkdir()
    (tmp_path / "step-00000800").mkdir()
    (tmp_path / "step-5").mkdir()
    assert _names(tmp_path) == ["step-00000900", "step-00009900", "step-00010000"]
    assert passed_over(tmp_path, tmp_path / "step-00010000") == [
        "step-00020000: it is a copy of step-00000005 under another name",
        "step-00010005: its save came to no end",
    ]
    assert len(passed_over(tmp_path, None)) == 3
    (tmp_path / "LATEST").symlink_to(old.name)
    assert fault_in(tmp_path / "LATEST") == ""
    sweep(tmp_path)
    assert not (tmp_path / ".step-00010005.draft").exists()


def test_56_rotation_goes_by_step_and_spares_the_best_and_what_is_pinned(tmp_path: Path) -> None:
    for step, loss in ((8, 2.0), (9, 1.0), (10, 1.0), (11, float("nan")), (12, 3.0)):
        os.utime(fake_checkpoint(tmp_path, step, {"best": loss}), (0, 0))
    (tmp_path / "step-00000008" / PIN_FILE).touch()
    assert [path.name for path in rotate(tmp_path, 2)] == ["step-00000010"]
    assert _names(tmp_path) == ["step-00000008", "step-00000009", "step-00000011", "step-00000012"]
    link(tmp_path)
    assert [os.readlink(tmp_path / name) for name in (LATEST, BEST)] == ["step-00000012", "step-00000009"]
    set_aside(tmp_path / "step-00000009")
    set_aside(tmp_path / "step-00000012")
    link(tmp_path)
    assert [os.readlink(tmp_path / name) for name in (LATEST, BEST)] == ["step-00000011", "step-00000008"]
    rotate(tmp_path, 1)
    assert _names(tmp_path) == ["step-00000008", "step-00000011"]


def test_links_go_with_the_last_checkpoint(tmp_path: Path) -> None:
    only = fake_checkpoint(tmp_path, 1, {})
    link(tmp_path)
    assert (tmp_path / LATEST).resolve() == only
    assert not (tmp_path / BEST).is_symlink()
    set_aside(only)
    link(tmp_path)
    assert not (tmp_path / LATEST).is_symlink()
