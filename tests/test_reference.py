"""The reference of keys in both contracts: every key, its default in the code, and what is not available yet."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardwise.config import NOT_AVAILABLE, apply_overrides
from shardwise.errors import ConfigError
from shardwise.spec import keys, rules
from shardwise.spec.run import LoraConfig, LrSchedulerConfig, RunConfig
from tests.test_docs import ROOT, cells, prose

OPTIONAL: dict[str, type[BaseModel]] = {"lora": LoraConfig, "train.lr_scheduler_kwargs": LrSchedulerConfig}
NOT_YET = {"en": "Not yet: ", "zh": "暂不可用："}


def key_rows(language: str) -> dict[str, tuple[str, str]]:
    """Key -> (default, meaning), of every table whose first column holds keys."""
    rows: dict[str, tuple[str, str]] = {}
    in_keys = False
    for line in prose(ROOT / f"docs/{language}/contract.md").splitlines():
        if not line.startswith("|"):
            in_keys = False
        elif cells(line)[0] in ("Key", "配置项"):
            in_keys = True
        elif in_keys and (key := re.fullmatch(r"`([\w.]+)`", cells(line)[0])):
            assert key[1] not in rows, f"{key[1]} stands twice"
            rows[key[1]] = (cells(line)[1], cells(line)[2])
    return rows


def refused_values(language: str) -> dict[str, str]:
    """Key -> the value that the reference says is not available yet."""
    found = {}
    for key, (_, meaning) in key_rows(language).items():
        if match := re.search(NOT_YET[language] + r"`([^`]+)`", meaning):
            found[key] = match[1]
    return found


def default_of(key: str) -> Any:
    """The default in the code; None where it is filled in later."""
    section, _, field = key.rpartition(".")
    owner = OPTIONAL.get(section, RunConfig)
    if section and section not in OPTIONAL:
        owner = RunConfig.model_fields[section].annotation  # type: ignore[assignment]
    default = next(f for n, f in owner.model_fields.items() if (f.alias or n) == field).default
    return None if default is PydanticUndefined else default


@pytest.mark.parametrize("language", ["en", "zh"])
def test_reference_lists_exactly_the_keys(language: str) -> None:
    known = keys.known_keys()
    leaves = [key for key in known if not any(other.startswith(f"{key}.") for other in known)]
    assert sorted(key_rows(language)) == sorted(leaves)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_reference_gives_the_defaults_of_the_code(language: str) -> None:
    for key, (shown, _) in key_rows(language).items():
        default = default_of(key)
        if default is not None:
            text = shown.strip("`")
            read_back = apply_overrides({}, [f"value={text}"])["value"]
            assert read_back == (list(default) if isinstance(default, tuple) else default), key


@pytest.mark.parametrize("language", ["en", "zh"])
def test_reference_marks_what_is_not_available(language: str) -> None:
    marked = refused_values(language)
    for key, value in marked.items():
        tree = apply_overrides({"model": "x"}, [f"{key}={value}"])
        with pytest.raises(ConfigError, match=NOT_AVAILABLE):
            rules.parse_run(tree)
    assert {key for key in rules._NEUTRAL if key != "lora"} <= set(marked)


def test_documented_values_are_accepted() -> None:
    """What a row names as a choice, before the mark of what is not available, is one."""
    for key in ("optimizer", "lr_scheduler"):
        meaning = key_rows("en")[f"train.{key}"][1]
        for value in re.findall(r"`(\w+)`", meaning):
            assert rules.parse_run({"model": "x", "train": {key: value}})
    for key in ("data.on_long", "data.format", "strategy.schedule"):
        meaning = key_rows("en")[key][1].split(NOT_YET["en"])[0]
        for value in re.findall(r"`(\w+)`", meaning):
            assert rules.parse_run(apply_overrides({"model": "x"}, [f"{key}={value}"]))
