"""A resume in the middle of an epoch keeps to its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError
from shardwise.spec.run import DataConfig, RunConfig, TrainConfig
from shardwise.train.identity import check_order


def _run(seed: int = 42, **data: Any) -> RunConfig:
    return RunConfig(model="m", data=DataConfig(**data), train=TrainConfig(seed=seed))


def _check(before: RunConfig, now: RunConfig, rows_seen: int = 4) -> None:
    saved = {"train": {"loader": {"epoch": 0, "rows_seen": rows_seen}}, "run": before.model_dump(mode="json")}
    check_order(saved, now, Path("step-00000001"))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (_run(shuffle=False), "order of data.shuffle = true, that of this run is false. Use data.shuffle=true"),
        (_run(group_by_length=True), "data.group_by_length = false"),
        (_run(seed=3), "data.seed = 42, that of this run is 3"),
        (_run(3).model_copy(update={"data": DataConfig(seed=7)}), "data.seed = 42, that of this run is 7"),
    ],
)
def test_another_order_is_refused_in_the_middle_of_an_epoch(now: RunConfig, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        _check(_run(), now)
    assert words in str(error.value)
    _check(_run(), now, rows_seen=0)  # the next epoch has an order of its own


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"max_length": 8}, "data.max_length = null, that of this run is 8. Use data.max_length=null"),
        ({"on_long": "drop"}, "data.on_long = refuse, that of this run is drop"),
    ],
)
def test_an_order_by_length_keeps_what_rows_are_cut_to(now: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        _check(_run(group_by_length=True), _run(group_by_length=True, **now))
    assert words in str(error.value)


def test_what_does_not_change_the_order_may_change() -> None:
    _check(_run(), _run(seed=3).model_copy(update={"data": DataConfig(seed=42, packing=True, max_length=9)}))
    _check(_run(shuffle=False), _run(seed=3, shuffle=False))
