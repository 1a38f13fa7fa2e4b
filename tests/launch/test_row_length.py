"""The length of rows to plan for is that of the rows that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.row_length import row_tokens
from shardwise.spec.rules import parse_run


def tokens(path: Path | str, positions: int = 4096, **data: Any) -> int:
    return row_tokens(parse_run({"model": "m", "data": {"train": str(path), **data}}), positions)


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
