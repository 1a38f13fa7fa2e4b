"""Which files are the weights: a wrong choice would train on other numbers without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.errors import CheckpointError
from shardwise.spec.weight_files import INDEX_FILE, WEIGHTS_FILE, weight_files


def _folder(path: Path, *names: str, index: dict[str, str] | None = None) -> Path:
    for name in names:
        (path / name).touch()
    if index is not None:
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return path


def test_a_backup_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, WEIGHTS_FILE, "model_backup.safetensors", "zzz.safetensors")
    assert weight_files(folder) == {folder / WEIGHTS_FILE: None}


def test_the_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    folder = _folder(tmp_path, WEIGHTS_FILE, "a.safetensors", index={"x": "a.safetensors"})
    assert weight_files(folder) == {folder / WEIGHTS_FILE: None}


def test_an_index_says_which_tensors_of_which_files(tmp_path: Path) -> None:
    index = {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
    folder = _folder(tmp_path, "a.safetensors", "b.safetensors", "c.safetensors", index=index)
    assert weight_files(folder) == {folder / "a.safetensors": ["x", "z"], folder / "b.safetensors": ["y"]}


def test_a_file_of_another_name_is_taken_where_it_is_the_only_one(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "weights.safetensors")
    assert weight_files(folder) == {folder / "weights.safetensors": None}


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"2 .safetensors files \(a.safetensors, b.safetensors\).*index"):
        weight_files(_folder(tmp_path, "a.safetensors", "b.safetensors"))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "a\0b"])
def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.safetensors").touch()
    with pytest.raises(CheckpointError, match="which is no file of its folder"):
        weight_files(_folder(tmp_path / "model", index={"x": name}))


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a readable index"):
        weight_files(tmp_path)
