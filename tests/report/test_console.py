"""The lines that a run prints of itself before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.report.console import gradient_line
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.strategy import resolve
from tests.spec.model_folder import make_spec


def _line(folder: Path, **strategy: Any) -> str:
    model = make_spec(folder)
    split, rows = resolve(parse_run({"model": "m", "strategy": strategy}), model, 1)
    return gradient_line(Plan(model, split, rows, "cpu"))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"dp_replicate": 2}, "summed over 2 replicas in buckets of 25 MiB"),
        ({"dp_replicate": 4, "gradient_aggregation_group": 1}, "summed over 4 replicas in 1 bucket,"),
        ({"dp_replicate": 2, "pp": 2, "gradient_aggregation_group": 3}, "over 2 replicas in 3 buckets,"),
        ({"dp_shard": 2}, "reduced in 4 units of blocks a stage, over 2 data ranks"),
        ({"dp_shard": 2, "gradient_aggregation_group": 9}, "reduced in 4 units of blocks"),
        ({"dp_shard": 2, "pp": 2, "gradient_aggregation_group": 1}, "reduced in 1 unit of blocks a stage"),
        ({"dp_replicate": 2, "dp_shard": 2}, "over 4 data ranks"),
        ({"tp": 2, "gradient_aggregation_group": 4}, "= 4: without data parallelism there is nothing to group"),
    ],
)
def test_how_gradients_are_summed(tmp_path: Path, strategy: dict[str, Any], words: str) -> None:
    assert words in _line(tmp_path / "m", **strategy)


def test_nothing_is_said_where_nothing_is_summed_and_nobody_asked(tmp_path: Path) -> None:
    assert _line(tmp_path / "m", tp=2) == ""
