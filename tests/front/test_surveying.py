"""``shardwise data show``: every row is in use, set apart, or counted with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import ConfigError
from shardwise.front import surveying
from tests.data.helpers import make_tokenizer, write
from tests.spec.model_folder import make_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_folder(tmp_path / "model", vocab_size=400)
    make_tokenizer().save_pretrained(folder)
    return folder


def talk(answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]}


def show(*arguments: str) -> str:
    return CliRunner().invoke(cli.app, ["data", "show", *arguments], catch_exceptions=False).stdout


def test_rows_are_shown_as_the_model_sees_them_and_what_is_wrong_is_counted(tmp_path: Path, model: Path) -> None:
    good = [talk(f"I am fine, {n} times") for n in range(20)]
    path = write(tmp_path / "d.jsonl", [*good, talk(None), talk(""), talk("a " * 200), {"messages": []}])
    given = [str(path), "--model", str(model)]
    answer = json.loads(show(*given, "data.val_size=0.25", "train.epochs=2", "train.global_batch_size=4", "--json"))
    (source,) = answer["sources"]
    assert (source["rows_read"], source["rows"], source["dropped"]) == (24, 20, 1)
    assert sum(source["bad"].values()) == 3
    assert [text for text in answer["refused"] if "3 bad rows" in text or "1 rows are too long" in text]
    assert len(answer["refused"]) == 2
    epoch = answer["epoch"]
    assert (epoch["rows"], epoch["set_apart"], epoch["steps"], epoch["steps_of_run"]) == (15, 5, 4, 8)
    assert sum(count for *_, count in answer["lengths"]["histogram"]) == 15
    first = answer["rows"][0]
    assert [text for text, supervised in first["pieces"] if supervised] == ["I am fine, 0 times<|im_end|>\n"]
    assert "".join(text for text, _ in first["pieces"]).startswith("<|im_start|>user\nHello<|im_end|>")
    assert (first["line"], first["tokens"]) == (1, len(make_tokenizer()(first_text(first))["input_ids"]))
    text = show(*given, "--rows", "1")
    assert "«I am fine, 0 times<|im_end|>\n»" in text
    assert "training would refuse 3 bad rows" in text


def test_a_long_conversation_among_texts_that_are_split_is_counted(tmp_path: Path, model: Path) -> None:
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "talks.jsonl", [talk("Fine"), talk("a " * 200)])
    write(tmp_path / "rows" / "texts.jsonl", [{"text": "a " * 200}])
    given = [str(tmp_path / "rows"), "--model", str(model), "data.on_long=split", "data.max_length=64"]
    answer = json.loads(show(*given, "--json"))
    (source,) = answer["sources"]
    assert (source["split"], source["refused"], source["dropped"]) == (1, 1, 0)
    assert source["rows"] > 3
    (reason,) = answer["refused"]
    assert "1 rows are too long and not learned as a whole" in reason
    assert "that cannot be split left out, the first on line 2" in "".join(answer["notes"])


def test_a_cache_that_cannot_be_written_to_is_done_without(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.jsonl", [talk("Fine")] * 3)
    monkeypatch.setattr(surveying, "SMALL_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    answer = json.loads(show(str(path), "--model", str(model), "--json"))
    assert answer["epoch"]["rows"] == 3


def first_text(row: dict[str, Any]) -> str:
    return "".join(text for text, _ in row["pieces"])


def test_a_set_without_any_row_is_refused(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "d.jsonl", [talk(None)])
    with pytest.raises(ConfigError, match="no valid rows: 1 left out because"):
        show(str(path), "--model", str(model))
