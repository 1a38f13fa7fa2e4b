"""Every rank has the same rows: mapped where it sees the cache, received where it does not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tokenizers.pre_tokenizers import PreTokenizer

from shardwise.config import apply_overrides
from shardwise.data import child
from shardwise.data.memory import MemoryData
from shardwise.data.prepared import prepare as prepare_rows
from shardwise.data.rows import Rows, Source
from shardwise.errors import ConfigError
from shardwise.front.resolve import prepare
from shardwise.testing import run_distributed
from shardwise.train import data
from tests.data.helpers import make_tokenizer
from tests.fixtures import make_rows
from tests.spec.model_folder import make_folder


def _rank(rank: int, overrides: list[str], cache: Path) -> tuple[list[Any], list[str]]:
    """For each way that rows come by: whether they are mapped and what they are; what was said."""
    run, plan = prepare(apply_overrides({}, overrides), command="script")
    found, said = [], list[str]()
    listed = [json.loads(line) for line in Path(str(run.data.train)).read_text().splitlines()]
    held = MemoryData({str(run.data.train): lambda: iter(listed)})
    for small, sees_cache, memory in ((1 << 30, True, None), (1, True, None), (1, rank == 0, None), (1, True, held)):
        with mock.patch.object(child, "SMALL_BYTES", small), mock.patch.object(data, "open_prepared") as opened:
            opened.side_effect = child_open if sees_cache else FileNotFoundError
            reader = data.DataReader(run, plan, memory, cache, 1, said.append)
            rows, apart = reader.train_rows()
        assert apart is not None
        mapped = isinstance(rows.stores[0].columns["input_ids"], np.memmap)
        lines = [[row.line for row in part] for part in (rows, apart)]
        found.append((mapped, lines, [row.labels.tolist() for row in rows], rows.fingerprint))
    return found, said


def child_open(folder: Path) -> Any:
    from shardwise.data.prepared import open_prepared

    return open_prepared(folder)


def test_rows_of_a_script_stay_in_memory_where_the_cache_cannot_be_written_to(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    cache = tmp_path / "file" / "cache"
    cache.parent.touch()
    run, plan = prepare({"model": str(tmp_path / "model"), "device": "cpu"}, command="script")
    said: list[str] = []
    held = MemoryData({"rows": lambda: iter(make_rows())})
    reader = data.DataReader(run, plan, held, cache, 1, said.append)
    found = reader._find(Source(Path("rows"), run, plan.model.vocab_size))
    assert isinstance(found, Rows)
    assert len(found) == len(make_rows())
    assert "rows stay in memory" in said[0]


def test_a_scripts_own_tokenizer_prepares_rows_where_it_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "model")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"Hello {n}"}) + "\n" for n in range(9)))
    run, plan = prepare({"model": str(tmp_path / "model"), "device": "cpu"}, command="script")
    source = Source(path, run, 1000)
    asked: list[Source] = []

    def ready(given: Source, cache: Path, *_: Any) -> Path:
        asked.append(given)
        return prepare_rows(given, cache, 1)

    monkeypatch.setattr(data, "ready", ready)
    own, said = make_tokenizer(), list[str]()
    reader = data.DataReader(run, plan, MemoryData({}, own), tmp_path / "cache", 1, said.append)
    assert isinstance(reader._find(source), Rows)  # small
    assert not asked
    monkeypatch.setattr(data, "SMALL_BYTES", 1)
    found = reader._find(source)
    assert isinstance(found, Path)
    rows = child_open(found)[0]
    assert own.decode(rows[8].input_ids) == "Hello 8</s>"
    assert source.run.tokenizer is None
    own.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(mock.Mock())  # nothing that a file can hold
    assert isinstance(reader._find(source), Rows)
    assert len(asked) == 1
    assert "rank 0 tokenises, and each rank holds the rows" in said[-1]


@pytest.mark.parametrize(
    ("strategy", "memory", "words"),
    [
        ("no", None, "3 of 8 rows are set apart and not evaluated: eval.strategy is no"),
        ("epoch", None, "3 of 8 rows are set apart for evaluation"),
        ("no", MemoryData(), "3 of 8 rows are set apart for evaluation"),
    ],
)
def test_rows_that_are_set_apart_and_not_evaluated_are_said_to_be(
    tmp_path: Path, strategy: str, memory: MemoryData | None, words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    tree = {"model": str(make_folder(tmp_path / "model")), "device": "cpu", "eval": {"strategy": strategy}}
    run, plan = prepare(tree | {"data": {"train": str(path), "val_size": 3}}, command="script")
    said: list[str] = []
    reader = data.DataReader(run, plan, memory, None, 1, said.append)
    with mock.patch.object(data, "from_rank_0", lambda work: work()):
        reader.train_rows()
    assert said == [f"data.val_size: {words}"]


def _refused(rank: int, overrides: list[str]) -> str:
    run, plan = prepare(apply_overrides({}, overrides), command="script")
    with pytest.raises(ConfigError) as error:
        data.DataReader(run, plan, None, None, 1, print).train_rows()
    return str(error.value)


@pytest.mark.slow
def test_ranks_have_the_same_rows_however_they_come_by_them(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    overrides = [f"model={tmp_path / 'model'}", f"data.train={path}", "data.val_size=3", "device=cpu"]
    first, second = run_distributed(_rank, 2, overrides, tmp_path / "cache")
    held, mapped, *_ = first[0]
    assert [ways[0] for ways in first[0]] == [False, True, True, True]  # rank 0 itself sees its cache
    assert [ways[0] for ways in second[0]] == [False, True, False, True]
    assert {json.dumps(ways[1:]) for ways in first[0] + second[0]} == {json.dumps(held[1:])}
    assert [path.name.startswith(".held") for path in (tmp_path / "cache").iterdir()] == [False]
    assert mapped[1:] == held[1:]
    assert sorted(held[1][0] + held[1][1]) == list(range(1, 9))
    assert any("not every machine sees" in line for line in first[1])
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [9999]}\n')
    assert [text.partition(": ")[2][:7] for text in run_distributed(_refused, 2, overrides)] == ["id 9999"] * 2


def test_what_killed_runs_have_left_is_swept_up(tmp_path: Path) -> None:
    for name, age in ((".held-old", 2 * 86400), (".held-new", 60), (".held-busy", 2 * 86400), ("kept", 2 * 86400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows").write_text("")
        then = time.time() - age
        if name != ".held-busy":  # files in it are still written
            os.utime(tmp_path / name / "rows", (then, then))
        os.utime(tmp_path / name, (then, then))
    data._sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".held-busy", ".held-new", "kept"]


@pytest.mark.parametrize(("held", "hosts", "sent"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_rows_of_a_folder_that_goes_are_sent_to_other_machines(held: bool, hosts: int, sent: bool) -> None:
    mapped, received = object(), object()

    def gather(box: list[Any], value: Any) -> None:
        box[:] = [value, value if isinstance(value, bool) else f"host{hosts}" if hosts > 1 else value]

    reader = data.DataReader(mock.Mock(), mock.Mock(), None, None, 1, lambda _text: None)
    with (
        mock.patch.object(data, "open_prepared", return_value=(mapped, {"notes": []})),
        mock.patch.object(data, "from_rank_0", return_value=received),
        mock.patch("torch.distributed.get_world_size", return_value=2),
        mock.patch("torch.distributed.all_gather_object", gather),
    ):
        rows: Any = reader._opened(mock.Mock(), Path("folder"), held)
    assert rows is (received if sent else mapped)
