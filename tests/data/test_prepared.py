"""Data that is tokenised once: by several processes as by one, found again, and mapped by all."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from shardwise.data import child, prepared
from shardwise.data.mixing import combine, mixed, split_off
from shardwise.data.prepared import find_prepared, keep_tokenizer, key_of, open_prepared, prepare, size_of
from shardwise.data.rows import Rows, Source, load_rows
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import load_tokenizer
from shardwise.spec.rules import parse_run
from tests.data.helpers import make_tokenizer, write

TALKS = [
    {"messages": [{"role": "user", "content": f"Hello {n}"}, {"role": "assistant", "content": "Fine " * (n % 5 + 1)}]}
    for n in range(603)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    return folder


def source(model: Path, path: Path, **data: Any) -> Source:
    run = parse_run({"model": str(model), "data": {"train": str(path), **data}})
    return Source(path, run, len(make_tokenizer()), 64, run.data.max_samples)


def contents(rows: Rows) -> list[tuple[Any, ...]]:
    return [(row.line, row.input_ids.tolist(), row.labels.tolist(), row.fingerprint, row.file) for row in rows]


def test_several_processes_write_what_one_reads_and_the_second_time_nothing_is_done(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.jsonl", [*TALKS, {"messages": []}])
    given, cache = source(model, path, on_bad_rows="skip"), tmp_path / "cache"
    said: list[str] = []
    read = load_rows(given, make_tokenizer, notify=said.append)
    assert find_prepared(given, cache) is None
    folder = prepare(given, cache, processes=2)
    rows, told = open_prepared(folder)
    assert isinstance(rows.stores[0].columns["input_ids"], np.memmap)
    assert contents(rows) == contents(read)
    assert (rows.fingerprint, rows.lengths.tolist()) == (read.fingerprint, read.lengths.tolist())
    assert told["notes"] == said
    assert told["counts"]["bad"] == {"the conversation is empty": 1}
    assert contents(pickle.loads(pickle.dumps(rows))) == contents(read)  # for a machine that does not see the files
    monkeypatch.setattr(prepared, "_write", lambda *arguments: pytest.fail("tokenised again"))
    assert prepare(given, cache, processes=2) == folder == find_prepared(given, cache)


def test_what_tokens_depend_on_names_them(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", TALKS[:3])
    keys = {key_of(source(model, path))}
    assert keys == {key_of(source(model, path, shuffle=False, seed=3, drop_last=True))}
    # Rows that are refused are in no folder: what is left out and what is refused go by one name.
    assert keys == {key_of(source(model, path, on_bad_rows="skip", on_long="drop"))}
    for name, value in [("max_length", 20), ("max_samples", 2), ("on_long", "truncate")]:
        keys.add(key_of(source(model, path, **{name: value})))
    write(path, TALKS[1:4])
    keys.add(key_of(source(model, path)))
    template = model / "chat_template.jinja"
    before = template.read_text()
    template.write_text("{{ messages }}")
    keys.add(key_of(source(model, path)))
    template.write_text(before)
    more = model / "words.of_a_class_of_its_own"
    more.write_text("a")
    keys.add(key_of(source(model, path)))
    more.unlink()
    (model / "model.safetensors").write_bytes(b"weights")
    keys.add(key_of(source(model, path)))
    (model / "model.safetensors").unlink()
    assert len(keys) == 7


def test_a_look_at_rows_and_a_run_share_a_folder_unless_the_run_refuses_what_the_look_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, cache = write(tmp_path / "good.jsonl", TALKS[:3]), tmp_path / "cache"
    looked = prepare(source(model, good, on_bad_rows="skip", on_long="drop"), cache, processes=1)
    assert find_prepared(source(model, good), cache) == looked
    long = {"on_long": "split", "max_length": 24}
    wide = write(tmp_path / "wide.jsonl", [TALKS[0], {"messages": [*TALKS[0]["messages"]] * 9}])
    looked = prepare(replace(source(model, wide, **long), is_look=True), cache, processes=1)
    assert find_prepared(replace(source(model, wide, **long), is_look=True), cache) == looked
    assert find_prepared(source(model, wide, **long), cache) is None
    bad = write(tmp_path / "bad.jsonl", [*TALKS[:3], {"messages": []}])
    looked = prepare(source(model, bad, on_bad_rows="skip", on_long="drop"), cache, processes=1)
    assert find_prepared(source(model, bad), cache) is None
    with pytest.raises(ConfigError, match=r"bad.jsonl:4: the conversation is empty"):
        prepare(source(model, bad), cache, processes=1)
    assert find_prepared(source(model, bad, on_bad_rows="skip"), cache) == looked


def test_what_others_have_fetched_or_kept_goes_by_its_own_age(tmp_path: Path) -> None:
    kept = keep_tokenizer(make_tokenizer(), tmp_path)
    names = ["hub/new", "hub/old", "tokenizers/old", "digests/new", "digests/old", "old"]
    for name in names:
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        _ = place.write_text("") if name.startswith("digests") else place.mkdir()
    for old in (kept, *tmp_path.iterdir(), *(tmp_path / name for name in names if name.endswith("old"))):
        os.utime(old, (1.0, 1.0))
    assert keep_tokenizer(make_tokenizer(), tmp_path) == kept  # used: not old any more
    prepared._forget_old(tmp_path)
    assert kept.is_dir()
    assert [name for name in names if (tmp_path / name).exists()] == ["hub/new", "digests/new"]


def test_what_foreign_code_prints_in_the_child_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    def shown(*given: Any) -> Path:
        print("a line of foreign code")
        given[-1](7)
        return tmp_path

    run = source(model, tmp_path / "d.jsonl").run.model_dump(mode="json", by_alias=True)
    request = {"parent": 0, "path": "d.jsonl", "run": run, "sizes": [9, 9, None], "cache": "c", "processes": 1}
    monkeypatch.setattr(child, "prepare_shown", shown)
    monkeypatch.setattr(child, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(child.signal, "signal", lambda *given: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    assert child.main() == 0
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [{"rows": 7}, {"folder": str(tmp_path)}]
    assert said.err == "a line of foreign code\n"


def test_a_tokenizer_of_a_script_is_kept_where_it_is_read_again_as_it_is(tmp_path: Path) -> None:
    own = make_tokenizer()
    folder = keep_tokenizer(own, tmp_path)
    assert load_tokenizer(folder)("Hello")["input_ids"] == own("Hello")["input_ids"]
    assert keep_tokenizer(make_tokenizer(), tmp_path) == folder
    assert keep_tokenizer(make_tokenizer(None), tmp_path) != folder
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2

    class Other(PreTrainedTokenizerFast):
        """What a script defines is not found by its name."""

    other = Other(tokenizer_object=own.backend_tokenizer, eos_token="</s>")
    with pytest.raises(ConfigError, match="tokenizer = Other"):
        keep_tokenizer(other, tmp_path)


def test_a_large_file_is_hashed_once_and_again_when_it_is_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path / "d.jsonl", TALKS[:3]), tmp_path / "cache"
    monkeypatch.setattr(prepared, "_LARGE_BYTES", path.stat().st_size)
    os.utime(path, (1, 1))
    key = key_of(source(model, path), cache)
    hashed: list[Path] = []
    monkeypatch.setattr(prepared, "_hashed", lambda file: hashed.append(file) or "other")
    key_of(source(model, path), cache)
    assert path not in hashed
    os.utime(path, (2, 2))
    assert key != key_of(source(model, path), cache)
    assert path in hashed


def test_a_folder_that_does_not_open_is_made_again(model: Path, tmp_path: Path) -> None:
    given, cache = source(model, write(tmp_path / "d.jsonl", TALKS[:3])), tmp_path / "cache"
    folder = prepare(given, cache, processes=1)
    os.truncate(folder / "labels.bin", 8)
    assert find_prepared(given, cache) is None
    assert find_prepared(given, tmp_path / ("a" * 300)) is None  # no file system has such a cache
    assert prepare(given, cache, processes=1) == folder
    assert len(open_prepared(folder)[0]) == 3


def test_a_file_that_cannot_be_read_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", TALKS[:3])
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    given = source(model, tmp_path)
    for look in (key_of, size_of):
        with pytest.raises(ConfigError, match=r"gone\.jsonl: the file cannot be read \(No such file"):
            look(given)


@pytest.mark.slow
def test_jobs_that_start_at_once_prepare_once_and_a_refusal_leaves_nothing(model: Path, tmp_path: Path) -> None:
    path, cache = write(tmp_path / "d.jsonl", TALKS[:5]), tmp_path / "cache"
    given = source(model, path)
    request = {
        "run": given.run.model_dump(mode="json", by_alias=True),
        "path": str(path),
        "sizes": [given.vocab_size, 64, None],
        "cache": str(cache),
        "processes": 1,
        "parent": os.getpid(),
    }
    command = [sys.executable, "-m", "shardwise.data.child"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    jobs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write(json.dumps(request).encode())
        job.stdin.close()
    answers = [json.loads(job.stdout.read().splitlines()[-1]) for job in jobs if job.stdout]
    assert [job.wait() for job in jobs] == [0, 0]
    (folder,) = cache.iterdir()
    assert answers == [{"folder": str(folder)}] * 2
    assert len(open_prepared(folder)[0]) == 5
    write(path, [*TALKS[:3], {"messages": []}])
    with pytest.raises(ConfigError, match=r"d.jsonl:4: the conversation is empty"):
        prepare(source(model, path), cache, processes=1)
    assert list(cache.iterdir()) == [folder]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_child_that_is_stopped_leaves_no_process(tmp_path: Path, number: signal.Signals, model: Path) -> None:
    line = json.dumps({"input_ids": list(range(100))}) + "\n"
    (tmp_path / "d.jsonl").write_text(line * 60_000, encoding="utf-8")
    given = source(model, tmp_path / "d.jsonl", max_length=64, on_long="split")
    request = {
        "run": given.run.model_dump(mode="json", by_alias=True),
        "path": given.name,
        "sizes": [given.vocab_size, None, None],
        "cache": str(tmp_path / "cache"),
        "processes": 2,
        "parent": os.getpid(),
    }
    command = [sys.executable, "-m", "shardwise.data.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write(json.dumps(request).encode())
        job.stdin.close()
        assert "rows" in json.loads(job.stdout.readline())
        pool = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(pool) == 2
        job.send_signal(number)
        job.send_signal(number)  # as a terminal and a launcher do
        assert job.wait(20) == (130 if number is signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while left := [process for process in pool if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_large_source_is_prepared_in_a_child_whose_refusal_comes_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [9999]}])
    monkeypatch.setenv("PYTHONPATH", str(Path(child.__file__).parents[2]))
    assert child.ready(source(model, path), tmp_path / "cache", 1, pytest.fail) is None  # small: not worth a child
    monkeypatch.setattr(child, "SMALL_BYTES", 1)
    with pytest.raises(ConfigError, match=r"d.jsonl:2: id 9999"):
        child.ready(source(model, path), tmp_path / "cache", 1, pytest.fail)


def test_a_progress_bar_has_no_thread_beside_which_processes_are_forked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before = io.StringIO(), threading.active_count()

    def tokenise(given: Source, cache: Path, processes: int, progress: prepared.Progress) -> Path:
        progress(500, 0.5)
        assert threading.active_count() == before
        assert "tokenised 500 rows" in out.getvalue()
        return cache

    monkeypatch.setattr(child, "prepare", tokenise)
    child.prepare_shown(source(model, tmp_path), tmp_path, 2, Console(file=out, force_terminal=True))


def test_rows_that_are_set_apart_are_the_same_each_time_and_never_trained_on(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [n, 1]} for n in range(100)])
    rows = load_rows(source(model, path), make_tokenizer)
    rest, apart = split_off(rows, 0.1, 42)
    assert (len(rest), len(apart)) == (90, 10)
    lines = [[row.line for row in part] for part in (rest, apart)]
    assert sorted(lines[0] + lines[1]) == list(range(1, 101))
    assert all(part == sorted(part) for part in lines)
    assert [row.line for row in split_off(rows, 10, 42)[1]] == lines[1]
    assert [row.line for row in split_off(rows, 10, 43)[1]] != lines[1]
    with pytest.raises(ConfigError, match=r"data.val_size = 100: of 100 rows 100 would be set apart.*at most 99"):
        split_off(rows, 100, 42)


@pytest.mark.parametrize("weights", [None, (1.0, 1.0), (0.3, 0.1), (5.0, 1.0)])
def test_sources_are_mixed_by_weight_and_no_row_is_lost(
    model: Path, tmp_path: Path, weights: tuple[float, float] | None
) -> None:
    sizes, parts, given = (30, 7), [], []
    for number, size in enumerate(sizes):
        path = write(tmp_path / f"{number}.jsonl", [{"input_ids": [number, n, 1]} for n in range(size)])
        parts.append(load_rows(source(model, path), make_tokenizer))
        given.append({"path": str(path)} | ({} if weights is None else {"weight": weights[number]}))
    run = parse_run({"model": "m", "data": {"train": given, "val_size": 4}})
    epoch = combine(parts, run)
    assert epoch.apart is not None
    seen = [tuple(row.input_ids.tolist()) for row in epoch.rows]
    apart = {tuple(row.input_ids.tolist()) for row in epoch.apart}
    everything = {(number, n, 1) for number, size in enumerate(sizes) for n in range(size)}
    assert set(seen) | apart == everything
    assert not set(seen) & apart
    assert epoch.counts == [sum(row[0] == number for row in seen) for number in (0, 1)]
    times = [[seen.count(row) for row in everything - apart if row[0] == number] for number in (0, 1)]
    assert all(max(found) - min(found) <= 1 for found in times)
    if weights is None:
        assert seen == sorted(seen)
        return
    assert epoch.counts[0] / epoch.counts[1] == pytest.approx(weights[0] / weights[1], rel=0.2)
    assert min(map(min, times)) == 1
    half = [row[0] for row in seen[: len(seen) // 2]].count(0) / (len(seen) // 2)
    assert half == pytest.approx(epoch.counts[0] / len(seen), abs=0.1)


@pytest.mark.parametrize("weight", [1001.5, 1e300])
def test_weights_that_repeat_rows_without_end_are_refused(model: Path, tmp_path: Path, weight: float) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [n, 1]} for n in range(4)])
    rows = load_rows(source(model, path), make_tokenizer)
    few = rows.take(np.arange(2))
    assert mixed([rows, few], [1.0, 500.0])[1] == [4, 2000]
    with pytest.raises(ConfigError, match=r"source 2 has 2 rows and would need [\d,.e+]+ in an epoch"):
        mixed([rows, few], [1.0, weight])
