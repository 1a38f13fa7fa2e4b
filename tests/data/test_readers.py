"""Files of every kind, found by their content, and files that are broken in every way."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data.readers import files_of, read_records
from shardwise.data.rows import CHUNK, Rows
from shardwise.errors import ConfigError
from tests.data.helpers import load, make_tokenizer, write
from tests.long import EVERYTHING

ROWS = [{"prompt": "Why?", "response": 'So.\n"yes", ok'}, {"prompt": "你好", "response": "😀"}]


def values(path: Path) -> list[Any]:
    return [record.value for record in read_records(path)]


def table(rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.compress(data, codec="zstd", asbytes=True)),
    ".lz4": lambda data: bytes(pa.compress(data, codec="lz4", asbytes=True)),
}
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
ARRAY = json.dumps(ROWS, ensure_ascii=False, indent=1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", LINES),
        ("d.jsonl", ARRAY),
        ("d.json", LINES),
        ("d.json", ARRAY),
        ("d.json", json.dumps(ROWS)),
        ("d", LINES),
        ("d.txt", LINES),
        ("d.csv", table(ROWS)),
        ("d.csv", "\ufeff" + table(ROWS, ";")),
        ("d.tsv", table(ROWS, "\t")),
    ],
)
@pytest.mark.parametrize("packed", ["", *PACKERS])
def test_the_rows_are_the_same_in_every_kind_of_file(tmp_path: Path, name: str, content: str, packed: str) -> None:
    data = content.encode("utf-8")
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / (name + packed)
    path.write_bytes(PACKERS[packed](data) if packed else data)
    assert values(path) == ROWS
    if "." in name:
        assert files_of(tmp_path / "rows") == [path]


def test_a_broken_packing_is_named_and_an_archive_refused(tmp_path: Path) -> None:
    for packed, pack in PACKERS.items():
        path = tmp_path / f"d.jsonl{packed}"
        path.write_bytes(pack(LINES.encode() * 100)[:-20])
        with pytest.raises(ConfigError, match=r"d\.jsonl\..*: the data file cannot be read"):
            read_records(path)
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ConfigError, match=r"is an archive of several files. Unpack it: unzip"):
        read_records(path)


def test_a_pattern_stands_for_its_files_and_a_file_of_that_very_name_for_itself(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "b/1.txt", "c/d/3.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, [{"text": name}])
    names = lambda pattern: [str(path.relative_to(tmp_path)) for path in files_of(tmp_path / pattern)]  # noqa: E731
    assert names("b/*.jsonl") == ["b/1.jsonl", "b/2.jsonl"]
    assert names("**/*.jsonl") == ["b/1.jsonl", "b/2.jsonl", "c/d/3.jsonl"]
    write(tmp_path / "b" / "[1].jsonl", [{"text": "x"}])
    assert names("b/[1].jsonl") == ["b/[1].jsonl"]
    write(tmp_path / "c" / "0.jsonl", [{"text": "y"}])
    assert names("c/*") == ["c/0.jsonl", "c/d/3.jsonl"], "a folder stands for its files here, too"
    with pytest.raises(ConfigError, match="there is no such data file"):
        files_of(tmp_path / "b" / "*.csv")
    assert [row.file for row in load_texts(tmp_path / "b" / "?.jsonl")] == [
        str(tmp_path / f"b/{n}.jsonl") for n in "12"
    ]


def load_texts(path: Path, **given: Any) -> Rows:
    tokenizer = make_tokenizer()
    return load(path, len(tokenizer), tokenizer=lambda: tokenizer, **given)


def test_a_folder_with_a_test_set_is_read_whole_and_a_line_says_so(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "validation-0.jsonl", "testimony.jsonl"):
        write(tmp_path / name, [{"text": name}])
    said: list[str] = []
    assert len(load_texts(tmp_path, notify=said.append)) == 3
    (line,) = said
    assert f"rows of {tmp_path / 'validation-0.jsonl'} are used like the others" in line
    load_texts(tmp_path / "t*", notify=said.append)
    assert len(said) == 1


def test_tables_of_arrow_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}], "tools": None}, {"messages": None, "tools": "x"}]
    arrow = pa.Table.from_pylist(rows)
    pq.write_table(arrow, tmp_path / "d.parquet")
    saved = tmp_path / "saved"  # as the library datasets writes it
    saved.mkdir()
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, arrow.schema) as out,
    ):
        out.write_table(arrow)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    expected = [{"messages": [{"role": "user", "content": "a"}]}, {"tools": "x"}]
    assert values(tmp_path / "d.parquet") == expected
    (part,) = files_of(saved)
    assert values(part) == expected
    (tmp_path / "e.parquet").write_bytes((tmp_path / "d.parquet").read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"e.parquet: the file is broken after row 0"):
        read_records(tmp_path / "e.parquet")


def test_a_folder_stands_for_its_files_and_each_may_have_its_own_format(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "a.jsonl", [{"input_ids": [1, 2]}])
    (tmp_path / "a.csv").write_text('input_ids,labels\n"[3, 4]",\n"[5, 6]","[-100, 6]"\n')
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / ".hidden.jsonl").write_text("{")
    rows = load(tmp_path)
    assert [row.input_ids.tolist() for row in rows] == [[3, 4], [5, 6], [1, 2]]
    assert [(Path(row.file).name, row.line) for row in rows] == [("a.csv", 2), ("a.csv", 3), ("a.jsonl", 1)]
    assert rows[1].labels.tolist() == [-100, 6]
    write(tmp_path / "b" / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [999]}])
    with pytest.raises(ConfigError, match=r"b/a.jsonl:2: id 999"):
        load(tmp_path)


def test_each_line_of_a_text_is_a_row_that_is_learned_as_a_whole(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    (tmp_path / "d.txt").write_text("Hello\n\n你好\n", encoding="utf-8")
    rows = load(tmp_path / "d.txt", len(tokenizer), tokenizer=lambda: tokenizer)
    assert [tokenizer.decode(row.input_ids) for row in rows] == ["Hello</s>", "你好</s>"]
    assert [row.line for row in rows] == [1, 3]
    assert all((row.labels == row.input_ids).all() for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.csv", "prompt,response\na,b\nc\nd,e\n", [":3: has 1 cells for 2 columns"]),
        ("d.csv", 'prompt,response\n"a"x,b\nd,e\n', [":2: not a row of a table"]),
        ("d.csv", "prompt,response\na,b\nc,\xff\n".encode("latin-1"), [":3", "not UTF-8"]),
        ("d.txt", "Hello\n你好\n".encode("gb18030"), [":2", "not UTF-8", "GBK"]),
        ("d.jsonl", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], ["cannot be read"]),
        ("d.jsonl", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20, ["cannot be read", "decompressing"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    tokenizer = make_tokenizer()
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        load(path, len(tokenizer), tokenizer=lambda: tokenizer)
    for word in words:
        assert word in str(error.value)


def test_a_row_that_hides_those_behind_it_is_never_left_out(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('[{"input_ids": [1, 2]}, {"input_ids": [3 4]}, {"input_ids": [5, 6]}]')
    with pytest.raises(ConfigError, match="would lose them"):
        load(tmp_path / "d.json", on_bad_rows="skip")
    (tmp_path / "d.csv").write_text('input_ids\n"[1, 2]"\n"[3, 4]\n"[5, 6]"\n')
    with pytest.raises(ConfigError, match="would lose them"):
        load(tmp_path / "d.csv", on_bad_rows="skip")


@pytest.mark.parametrize("first", [{"conversations": []}, {"conversations": None}, {"note": 3}])
def test_a_row_without_turns_does_not_say_which_format_the_others_have(tmp_path: Path, first: dict[str, Any]) -> None:
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    path = write(tmp_path / "d.jsonl", [*[first] * CHUNK, {"conversations": talk, "id": "a7"}, {"conversations": []}])
    said: list[str] = []
    given: dict[str, Any] = {"on_bad_rows": "skip", "notify": said.append, "tokenizer": lambda: TOKENIZER}
    assert [row.line for row in load(path, len(TOKENIZER), **given)] == [CHUNK + 1]
    assert f"{CHUNK + 1} bad rows left out" in said[0]
    assert said[1].endswith("columns with text that are not used: id")
    with pytest.raises(ConfigError, match=f":{CHUNK + 2}: the conversation is empty"):
        load(
            write(path, [{"conversations": talk}] * (CHUNK + 1) + [{"conversations": []}]),
            len(TOKENIZER),
            **given | {"on_bad_rows": "refuse"},
        )


TOKENIZER = make_tokenizer()

# Files that are broken in every way: each row is used, or counted, or the file is refused in one message.

GOOD = st.lists(st.integers(0, 131), min_size=2, max_size=5).map(lambda ids: json.dumps({"input_ids": ids}).encode())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["input_ids", "labels", "messages", "role", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
BROKEN = st.one_of(
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=12).map(lambda data: data.replace(b"\n", b" ")),
    st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass").replace(b"\n", b" ")),
    GOOD.flatmap(lambda line: st.integers(0, len(line)).map(lambda cut: line[:cut])),
)


def _damaged(data: bytes, place: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


WRAPPED = st.one_of(
    st.just(lambda data: data),
    st.just(gzip.compress),
    st.integers(2, 1000).map(lambda place: lambda data: _damaged(gzip.compress(data), max(2, place))),
    st.integers(2, 40).map(lambda cut: lambda data: gzip.compress(data)[: max(3, len(data) - cut)]),
    st.sampled_from([b"", b"PAR1"]).map(lambda end: lambda data: b"PAR1" + data + end),
)


@settings(
    max_examples=1000 if EVERYTHING else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lines=st.lists(GOOD | BROKEN, max_size=8),
    name=st.sampled_from(["d.jsonl", "d.json", "d.csv", "d.txt", "d", "d.parquet"]),
    wrap=WRAPPED,
    skip=st.booleans(),
)
def test_a_broken_file_is_refused_or_its_rows_are_counted(
    tmp_path: Path, lines: list[bytes], name: str, wrap: Callable[[bytes], bytes], skip: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(wrap(b"\n".join(lines)))
    said: list[str] = []
    try:
        rows = load(
            path,
            len(TOKENIZER),
            tokenizer=lambda: TOKENIZER,
            on_bad_rows="skip" if skip else "refuse",
            max_positions=64,
            notify=said.append,
        )
    except ConfigError as error:
        assert "Traceback" not in str(error)
        return
    found = read_records(path)
    left_out = sum(int(part.split(" bad rows")[0].split()[-1]) for part in said if " bad rows" in part)
    dropped = sum(int(part.split(" rows longer")[0].split()[-1]) for part in said if " rows longer" in part)
    assert len(rows) + left_out + dropped == len(found)
    assert skip or not left_out
