"""Scalars mean what they say, what is dumped reads back equal, and every broken file is named with its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.config import STRATEGY_KEYS, apply_overrides, dump_yaml, load_yaml, nearest, nearest_multiples
from shardwise.errors import ConfigError
from shardwise.spec.run import RunConfig, StrategyConfig


def _write(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("1e-4", 1e-4),
        ("5.0e-05", 5e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1f1b", "1f1b"),
        ("null", None),
        ("~", None),
        ("[4, 3]", [4, 3]),
        ("'12'", "12"),
        (".inf", math.inf),
    ],
)
def test_scalars_mean_what_they_say_in_a_file_and_in_an_override(tmp_path: Path, text: str, value: object) -> None:
    for read in (load_yaml(_write(tmp_path, f"key: {text}\n")), apply_overrides({}, [f"key={text}"])):
        assert read == {"key": value}
        assert type(read["key"]) is type(value)


words = st.text(st.characters(codec="utf-8"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(words, scalars, max_size=3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(words, values, min_size=1, max_size=4))
def test_what_is_dumped_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]) -> None:
    assert load_yaml(_write(tmp_path_factory.getbasetemp(), dump_yaml(tree))) == tree


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ["line 3", "'a'", "twice", "line 1"]),
        ("a: 1\ntrain:\n  seed: 1\n  seed: 2\n", ["line 4", "'seed'", "twice"]),
        ("a: 1\nb: [1, 2\n", ["line 3", "YAML"]),
        ("a: 1\n\tb: 2\n", ["line 2", "YAML"]),
        ("- 1\n- 2\n", ["list", "mapping"]),
        ("just text", ["str", "mapping"]),
        ("", ["is empty"]),
        ("# only a comment\n", ["is empty"]),
        ("a: 1\n---\nb: 2\n", ["line 2", "another document"]),
        ("a: \x00", ["line 1", "YAML"]),
        ("a: !!int abc", ["YAML"]),
        ("a: !!python/object:os.system 1", ["line 1", "YAML"]),
        ("? {a: 1}\n: 2", ["line 1", "YAML"]),
        ("a: *b", ["line 1", "YAML"]),
        ("[" * 5000, ["YAML"]),
        ("模型: 甲\n".encode("gbk"), ["line 1", "UTF-8"]),
        (b"a: 1\nb: \xff\n", ["line 2", "UTF-8"]),
        ("a: 1".encode("utf-16"), ["UTF-8"]),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    for word in [str(path), *words]:
        assert word in str(error.value) or (word == "YAML" and "nested too deeply" in str(error.value))


def test_a_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    _write(tmp_path, "a: 1")
    with pytest.raises(ConfigError, match=r"no such file.*run\.yaml"):
        load_yaml(tmp_path / "rum.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_yaml(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert load_yaml(_write(tmp_path, b"\xef\xbb\xbfmodel: \xe7\x94\xb2\n")) == {"model": "甲"}


def test_overrides_leave_the_tree_alone_and_the_last_one_wins() -> None:
    tree = {"strategy": {"tp": 1}, "data": None}
    changed = apply_overrides(tree, ["tp=2", "strategy.tp=4", "data.train=a=b.jsonl", "chat_template={{ x }}"])
    assert changed == {"strategy": {"tp": 4}, "data": {"train": "a=b.jsonl"}, "chat_template": "{{ x }}"}
    assert tree == {"strategy": {"tp": 1}, "data": None}


@pytest.mark.parametrize("override", ["tp", "=2", "train..seed=1", ".=1", "train.seed=", "stages=[4,"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="argument"):
        apply_overrides({}, [override])


def test_an_override_does_not_run_through_a_value() -> None:
    with pytest.raises(ConfigError, match=r"data = 'x\.jsonl'.*is not a section"):
        apply_overrides({"data": "x.jsonl"}, ["data.train=y.jsonl"])


def test_short_names_are_the_keys_of_the_strategy_and_of_nothing_else() -> None:
    assert set(StrategyConfig.model_fields) == STRATEGY_KEYS
    assert not STRATEGY_KEYS & set(RunConfig.model_fields)


def test_nearest() -> None:
    assert nearest("stratgy", ["strategy", "save"]) == "strategy"
    assert nearest("lr", ["learning_rate", "seed"]) == "learning_rate"
    assert nearest("xyz", ["strategy", "save"]) is None


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_nearest_multiples_enclose_the_value(value: int, unit: int) -> None:
    near = nearest_multiples(value, unit)
    assert all(size > 0 and size % unit == 0 and abs(size - value) <= unit for size in near)
    assert max(near) > value
    assert len(near) == 2 or value < unit
