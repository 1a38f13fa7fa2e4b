from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.data.readers import files_of, read_records
from shardwise.errors import ConfigError


def file(folder: Path, text: str | bytes, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def test_blank_lines_bom_and_carriage_returns_are_no_rows(tmp_path: Path) -> None:
    path = file(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    assert [(r.line, r.value, r.error) for r in read_records(path)] == [(1, {"a": 1}, ""), (4, {"a": 2}, "")]


def test_files_that_were_put_one_behind_the_other_have_a_mark_in_the_middle(tmp_path: Path) -> None:
    path = file(tmp_path, b'\xef\xbb\xbf{"a": 1}\n\xef\xbb\xbf{"a": "\xef\xbb\xbf"}\r\n')
    assert [(r.line, r.value, r.error) for r in read_records(path)] == [(1, {"a": 1}, ""), (2, {"a": "\ufeff"}, "")]


def test_objects_over_several_lines_follow_each_other(tmp_path: Path) -> None:
    path = file(tmp_path, '{\n "a": 1\n}\n\n{\n "a": 2}{"a": 3}\n', "d.json")
    assert [(r.line, r.value) for r in read_records(path)] == [(1, {"a": 1}), (5, {"a": 2}), (6, {"a": 3})]
    *_, broken = read_records(file(tmp_path, '{\n "a": 1\n}\n{"a": \n', "d.json"))
    assert (broken.line, broken.is_last) == (4, True)
    one = file(tmp_path, json.dumps({"messages": [{"role": "user", "content": "a"}]}, indent=1), "one.json")
    assert [r.value["messages"][0]["role"] for r in read_records(one)] == ["user"]


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    path = file(tmp_path, json.dumps({"t": text}, ensure_ascii=False) + "\n" + '{"t": 2}\n')
    assert [(r.line, r.value["t"]) for r in read_records(path)] == [(1, text), (2, 2)]


def test_a_broken_line_keeps_its_number_and_the_rest_is_read(tmp_path: Path) -> None:
    path = file(tmp_path, '{"a": 1}\n{"a": \n{"a": 3},\n' + "[" * 100_000 + '\n{"a": 4}\n')
    first, broken, comma, deep, last = read_records(path)
    assert (first.line, last.line) == (1, 5)
    assert broken.line == 2
    assert "not JSON" in broken.error
    assert comma.line == 3
    assert "comma" in comma.error
    assert deep.line == 4
    assert deep.error


def test_max_records_counts_rows_not_lines(tmp_path: Path) -> None:
    path = file(tmp_path, '{"a": 1}\n\n{"a": 2}\nbroken\n')
    assert [r.value for r in read_records(path, 2)] == [{"a": 1}, {"a": 2}]


def test_a_json_array_gives_each_item_its_line(tmp_path: Path) -> None:
    path = file(tmp_path, '[\n  {"a": 1},\n\n  {"a":\n 2}\n, {"a": 3}]\n', "d.json")
    assert [(r.line, r.value["a"]) for r in read_records(path)] == [(2, 1), (4, 2), (6, 3)]
    assert read_records(file(tmp_path, " [ ] \n", "empty.json")) == []


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[\n{"a": 1},\n]', 3, "comma before"),
        ('[\n{"a": 1}\n{"a": 2}]', 3, "without a comma"),
        ('[\n{"a": 1},\n{"a": }]', 3, "not JSON"),
        ('[\n{"a": 1}', 2, "without a comma or a closing"),
        ('[\n{"a": 1}]\n{"a": 2}', 3, "follows the array"),
        ('[]\n{"a": 2}', 2, "follows the array"),
    ],
)
def test_a_broken_array_names_the_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    last = read_records(file(tmp_path, text, "d.json"))[-1]
    assert last.line == line
    assert reason in last.error


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.json", '{\n"rows": [{"a": 1}]}', ["d.json:1", "one object", "'rows'"]),
        ("d.json", '{"rows": [{"a": 1}], "version": 2}\n', ["d.json:1", "one object", "'rows'"]),
        ("d.jsonl", '{"a": 1}\n{"a": "你好"}'.encode("gbk"), ["d.jsonl:2", "not UTF-8", "GBK", "iconv"]),
        ("d.jsonl", b'{"a": 1}\n\n{"a": "\xff\xff"}', ["d.jsonl:3", "not UTF-8"]),
        ("d.jsonl", '{"a": 1}'.encode("utf-16"), ["UTF-16", "iconv"]),
        ("d.csv", "a,b,a\n1,2,3\n", ["d.csv:1", "two columns have the name 'a'"]),
        ("d.xml", "<rows/>", ["d.xml", ".jsonl", "JSON"]),
    ],
)
def test_a_file_that_contradicts_its_name_or_encoding_is_refused(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        read_records(file(tmp_path, content, name))
    for word in words:
        assert word in str(error.value)


def test_an_absent_file_names_the_nearest_and_a_folder_is_refused(tmp_path: Path) -> None:
    file(tmp_path, "", "train.jsonl")
    with pytest.raises(ConfigError, match=r"no such data file.*train.jsonl"):
        read_records(tmp_path / "trian.jsonl")
    (tmp_path / "sub.jsonl").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_records(tmp_path / "sub.jsonl")
    with pytest.raises(ConfigError, match="folder without data files"):
        files_of(tmp_path / "sub.jsonl")
    with pytest.raises(ConfigError, match="no such data file"):
        read_records(tmp_path / "nowhere" / "d.jsonl")


def test_linked_folders_are_read_and_links_in_a_circle_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "other"):
        (tmp_path / name).mkdir()
    file(tmp_path / "other", "{}")
    (tmp_path / "a" / "sub").symlink_to(tmp_path / "other")
    assert files_of(tmp_path / "a") == [tmp_path / "a" / "sub" / "d.jsonl"]
    (tmp_path / "other" / "back").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"a/sub/back: is a link to a folder that it lies in"):
        files_of(tmp_path / "a")


def test_text_and_file_names_are_utf8_under_the_c_locale(tmp_path: Path) -> None:
    file(tmp_path, json.dumps({"t": "你好 😀"}, ensure_ascii=False), "数据.jsonl")
    code = (
        "import json, sys; from pathlib import Path; from shardwise.data.readers import read_records\n"
        "folder = Path(sys.argv[1])\n"
        "print(json.dumps(read_records(folder / '\\u6570\\u636e.jsonl')[0].value))\n"
        "try: read_records(folder / '\\u6570.jsonl')\n"
        "except Exception as error: print(json.dumps(str(error)))\n"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, check=True, timeout=60
    )
    value, message = map(json.loads, done.stdout.splitlines())
    assert value == {"t": "你好 😀"}
    assert "数.jsonl" in message
    assert "数据.jsonl" in message
