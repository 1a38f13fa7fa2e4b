"""Files that are replaced in one move."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.files import replace_text


def test_a_file_is_made_and_replaced_with_the_rights_of_new_files(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    replace_text(path, "é 一")
    replace_text(path, "two")
    (tmp_path / "plain").write_text("")
    assert path.read_text(encoding="utf-8") == "two"
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain", "status.json"]


@pytest.mark.parametrize("where", ["write", "move"])
def test_what_was_there_stays_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("all steps")

    def full_disk(self: Path, text: str, **_: object) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(28, "No space left on device")

    def no_move(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(*((Path, "write_text", full_disk) if where == "write" else (os, "replace", no_move)))
    with pytest.raises(OSError, match=r"No space|Input/output"):
        replace_text(path, "fewer steps")
    assert path.read_text() == "all steps"
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_link_stays_a_link_and_a_pipe_is_written_straight(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    replace_text(link, "through")
    assert link.is_symlink()
    assert target.read_text() == "through"
    reader, writer = os.pipe()
    replace_text(Path(f"/dev/fd/{writer}"), "straight")
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "straight"
