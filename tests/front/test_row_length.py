"""The length of rows to plan for is that of the rows that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.front.planning import make_job
from shardwise.front.row_length import row_length
from shardwise.planner.explain import answer
from shardwise.planner.search import search
from shardwise.planner.shape import Shape, model_costs
from shardwise.spec.rules import parse_run
from tests.spec.model_folder import make_folder


def tokens(path: Path | str, positions: int = 4096, **data: Any) -> int:
    return row_length(parse_run({"model": "m", "data": {"train": str(path), **data}}), positions).tokens


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_longest_of_the_first_rows_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"input_ids": [1] * n} for n in (20, 90, 30)] + [{"input_ids": [1]}] * 300)
    assert tokens(path) == 90
    assert tokens(path, max_length=64) == 64
    assert tokens(path, positions=32) == 32
    assert tokens(path, max_length=2048) == 90
    assert tokens(path, max_length=2048, packing=True) == 2048


def test_packing_without_a_limit_packs_to_the_longest_row(tmp_path: Path) -> None:
    """As the loader does, not to all positions of the model."""
    path = write(tmp_path / "rows.jsonl", [{"input_ids": [1] * n} for n in (20, 90, 30)])
    assert tokens(path, positions=131072, packing=True) == 90
    unknown = row_length(parse_run({"model": "m", "data": {"packing": True}}, planned=True), 2**31 - 1)
    assert unknown.tokens == 4096


def test_a_source_that_cannot_be_read_counts_beside_one_that_can(tmp_path: Path) -> None:
    short = write(tmp_path / "short.jsonl", [{"input_ids": [1] * 24}])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{broken\n", encoding="utf-8")
    sources = [{"path": str(short)}, {"path": str(broken)}]
    found = row_length(parse_run({"model": "m", "data": {"train": sources}}), 4096)
    assert found.tokens == 512
    assert found.source == "the longest of the first 200 rows, 512 for a source that cannot be read here"


def test_texts_count_by_their_bytes(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a" * 290}, {"role": "assistant", "content": "\u6f22" * 100}]
    path = write(tmp_path / "rows.jsonl", [{"messages": turns}])
    assert 190 < tokens(path) < 210


@pytest.mark.parametrize("content", ["", "{broken\n"])
def test_rows_that_cannot_be_read_here_count_as_usual_ones(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    assert tokens(path) == 512
    assert tokens("<train_dataset>") == 512


def test_plans_of_devices_that_are_not_here_look_at_the_rows_too(tmp_path: Path) -> None:
    """One rule: with data their rows, else what is given, else a usual length; and the answer says which it was."""
    model, rows = make_folder(tmp_path / "model"), write(tmp_path / "rows.jsonl", [{"input_ids": [1] * 24}])
    tree: dict[str, Any] = {"model": str(model), "cluster": "a100-80gb", "devices": 2}
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    costs = model_costs(Shape("tiny", 4, 32, 4, 2, 8, 48, 132), (1, 2))
    for data, wanted, source in (
        ({"train": str(rows)}, 24, "the longest of the first 200 rows"),
        ({"train": str(rows), "max_length": 16}, 16, "data.max_length"),
        ({"max_length": 32}, 32, "data.max_length, since no data are given"),
        ({}, 64, "the positions of the model, since no data are given"),
        ({"max_length": 65}, 64, "the positions of the model, fewer than data.max_length, since no data are given"),
    ):
        with mock.patch("shardwise.front.planning.costs_of", return_value=costs):
            job = make_job(tree | {"data": data, "train": {"global_batch_size": 8}}, environ)
        assert (job.work.sequence, job.sequence_from) == (wanted, source)
        told = answer(job, search(job, 1))
        assert (told["sequence_length"], told["sequence_length_from"]) == (wanted, source)
    usual = row_length(parse_run({"model": "m"}, planned=True), 131072)
    assert usual.tokens == 4096
