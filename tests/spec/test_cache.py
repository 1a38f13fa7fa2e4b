"""The user's cache: its folders, the names of its files, and that a file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.spec.cache import cache_folder, code_hash, hash_of_all, write_whole
from shardwise.spec.data_files import data_folder
from shardwise.spec.described import description_folder
from shardwise.tensor.cache import table_folder


def test_where_the_cache_is() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "machine") == Path("/c/shardwise/machine")
    assert cache_folder({"HOME": "/h", "XDG_CACHE_HOME": ""}, "machine") == Path("/h/.cache/shardwise/machine")
    folders = [find({"HOME": "/h"}) for find in (data_folder, description_folder, table_folder)]
    assert folders == [Path("/h/.cache/shardwise") / name for name in ("data", "models", "tables")]
    assert [find({}) for find in (data_folder, description_folder, table_folder)] == [None] * 3


def test_a_name_depends_on_every_part_and_on_their_order() -> None:
    names = [hash_of_all(parts) for parts in (["a", 1], ["a", 2], [1, "a"], ["a1"], ["a", 1, ""])]
    assert len(set(names)) == len(names)
    assert hash_of_all(["a", 1]) == hash_of_all(["a", "1"])


def test_the_hash_of_code_is_that_of_the_rooms_that_are_named() -> None:
    assert code_hash(("spec",)) != code_hash(("spec", "tensor"))


def test_what_is_interrupted_leaves_what_was_there_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "file.json"
    write_whole(path, "before")

    def interrupt(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(path.parent.iterdir()) == [path]


def test_where_nothing_can_be_written_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_whole(tmp_path / "file" / "below", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
