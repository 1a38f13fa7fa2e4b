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
from tests.parallel import layouts
from tests.parallel.harness import ADAMW, SGD, Case, Outcome, reference, strategy
from tests.parallel.tables import Table, assert_equal

pytestmark = pytest.mark.slow

BLOCKS = {"llama-odd": 5}
MODELS = ("llama", "llama-tied", "llama-odd", "qwen2", "qwen3", "qwen3-tied")
_APART = ("one", "pp2-interleaved")  # the latter has a table of its own, tests/parallel/test_interleaved.py
LAYOUTS = {name: degrees for name, degrees in layouts.LAYOUTS.items() if name not in _APART}
LAYOUTS |= {"pp4": {"pp": 4}, "dp_shard3": {"dp_shard": 3}}
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


# Llama under every layout, in float64, where nothing hides. The others repeat what they are there for: weights shared
# by the ends and norms of heads, an odd vocabulary and number of blocks, biases, norms of heads alone, a tie alone.
FLOAT64_ROWS: dict[str, tuple[str, ...]] = {
    "llama": (*LAYOUTS, *EXTRA, *(f"{name}/recompute" for name in ("tp2", "pp2", "dp_shard2", "hsdp2x2"))),
    "qwen3-tied": (*LAYOUTS, "tp4", "pp2-uneven", "tp2-pp2-dp2/recompute"),
    "llama-odd": ("tp2", "pp2", "pp4", "dp_shard3", "tp2-pp2-dp2"),
    "qwen2": ("tp2", "pp2", "dp_shard2", "tp2-dp2"),
    "qwen3": ("tp2", "dp_shard2", "tp2-pp2"),
    "llama-tied": ("pp2", "dp_replicate2", "tp2-pp2"),
}
# Six steps in fp32 show the optimizer and the clipping at work.
FP32_ROWS = {
    "sgd": ("llama/tp2", "llama/pp2", "llama/dp_shard3", "llama/tp2-pp2-dp2"),
    "adamw": ("llama/tp2", "llama/dp_replicate2", "llama/pp4", "llama/hsdp2x2"),
}


def _is_kept(row: str, kind: str) -> bool:
    model, _, name = row.partition("/")
    return EVERYTHING or (name in FLOAT64_ROWS[model] if kind == "float64" else row in FP32_ROWS[kind])


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
