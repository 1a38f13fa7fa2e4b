"""The parity table: every layout of every model equals one process, step by step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import ADAMW, SGD, Case, Outcome, reference, strategy
from tests.parallel.tables import Table, assert_equal

pytestmark = pytest.mark.slow

BLOCKS = {"llama-odd": 5}
MODELS = ("llama", "llama-tied", "llama-odd", "qwen2", "qwen3", "qwen3-tied")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "dp_replicate2": {"dp_replicate": 2},
    "dp_shard2": {"dp_shard": 2},
    "dp_shard3": {"dp_shard": 3},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-dp2": {"tp": 2, "dp_shard": 2},
    "pp2-dp2": {"pp": 2, "dp_shard": 2},
    "tp2-pp2-dp2": {"tp": 2, "pp": 2, "dp_shard": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
}
# Variants of a layout that change how it runs but not what comes out.
EXTRA: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4},  # more tensor ranks than key/value heads
    "tp2-dp_replicate2": {"tp": 2, "dp_replicate": 2},
    "pp2-dp_replicate2": {"pp": 2, "dp_replicate": 2},
    "pp2-gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp2-uneven": {"pp": 2, "stages": (1, 3)},
    "dp_shard2-zero2": {"dp_shard": 2, "reshard": False},
    "pp2-dp2-zero3": {"pp": 2, "dp_shard": 2, "reshard": True},
}
RECOMPUTED = ("llama", "qwen3-tied")


def _rows() -> tuple[dict[str, list[int]], ...]:
    """Nine rows: lengths change from step to step, and each epoch ends with a batch of one row."""
    return tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))


def _table() -> dict[str, tuple[str, dict[str, Any]]]:
    rows = {f"{model}/{name}": (model, degrees) for model in MODELS for name, degrees in LAYOUTS.items()}
    rows |= {f"{model}/{name}": (model, d) for model in ("llama", "qwen3-tied") for name, d in EXTRA.items()}
    return rows | {
        f"{model}/{name}/recompute": (model, d | {"recompute": 1 if name == "tp2" else -1})
        for model in RECOMPUTED
        for name, d in LAYOUTS.items()
    }


TABLE = _table()


# Six steps in fp32 show the optimizer and the clipping at work; what a layout does to a gradient shows in float64.
FP32_LAYOUTS = ("tp2", "pp2", "pp4", "dp_shard3", "dp_replicate2", "tp2-pp2-dp2", "hsdp2x2")


def _is_kept(row: str, kind: str) -> bool:
    """All rows in float64, where nothing hides; fp32 repeats some of one model."""
    return kind == "float64" or EVERYTHING or row in [f"llama/{layout}" for layout in FP32_LAYOUTS]


CASES = [(row, kind) for kind in ("sgd", "adamw", "float64") for row in TABLE if _is_kept(row, kind)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), name) for name in MODELS}


def _case(folders: dict[str, Path], row: str, kind: str) -> Case:
    model, degrees = TABLE[row]
    split = strategy(BLOCKS.get(model, 4), **degrees)
    size = 6 if split.dp == 3 else 4
    case = Case(folders[model], split, _rows(), global_batch_size=size, eval_batch_size=5)
    if kind == "adamw":
        return replace(case, train=ADAMW)
    return replace(case, dtype=torch.float64, steps=2) if kind == "float64" else replace(case, train=SGD)


@cache
def _reference(folder: Path, size: int, kind: str) -> Outcome:
    case = Case(folder, strategy(), _rows(), global_batch_size=size, eval_batch_size=5)
    changes: dict[str, Any] = {"adamw": {"train": ADAMW}, "float64": {"dtype": torch.float64, "steps": 2}, "sgd": {}}
    return reference(replace(case, **changes[kind]))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Table:
    return Table({(row, kind): _case(folders, row, kind) for row, kind in CASES})


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_equals_one_process(row: str, kind: str, outcomes: Table, note_error: Any) -> None:
    case = outcomes.cases[row, kind]
    want = _reference(case.folder, case.global_batch_size, kind)
    assert_equal(outcomes[row, kind], want, note_error, kind, case.train.optimizer)
