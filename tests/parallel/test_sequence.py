"""Sequence parallel: the same loss, norm, gradients and weights as one process, for every layout and family."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.families import make_family
from tests.parallel.harness import ADAMW, Case, Outcome, reference, strategy
from tests.parallel.tables import Table, assert_equal

pytestmark = pytest.mark.slow

# Steps of 11, 16 and 9 positions: neither 2 nor 4 divides the first and the last.
ROWS = tuple(make_rows((4, 6, 8, 11, 12, 14, 16, 16, 9)))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-recompute": {"tp": 2, "recompute": -1},
    "tp2-recompute1": {"tp": 2, "recompute": 1},
    "tp4": {"tp": 4},  # more tensor ranks than key/value heads
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-pp2-recompute": {"tp": 2, "pp": 2, "recompute": -1},
    "tp2-pp2-interleaved": {"tp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "tp2-dp_shard2": {"tp": 2, "dp_shard": 2},
    "tp2-dp_replicate2": {"tp": 2, "dp_replicate": 2},
}
FAMILIES = {
    "gpt_neox": {},  # attention and MLP beside each other, biases everywhere
    "gpt2": {},
    "phi": {},  # one norm for both
    "gemma2": {},  # norms behind attention and MLP
    "opt": {},  # the block calls the MLP's matrices itself
    "bloom": {},  # attention adds the residual
    "qwen2_moe": {"num_hidden_layers": 2},
    "llama4_text": {"num_hidden_layers": 2},  # its experts take every token once for each of them
}
if EVERYTHING:
    FAMILIES |= {"qwen3_moe": {"num_hidden_layers": 2}}
# The bias of k moves all scores of a query alike: its gradient is 0 but for rounding, which AdamW divides by itself. In
# fp32 that moves the bias, in whatever layout; in float64 it stays below AdamW's epsilon.
BIASED_KEYS = ("gpt_neox", "gpt2", "phi", "opt", "bloom")
PLAIN = ("llama", "qwen3-tied")


REPEATED = ("tp2", "tp4", "tp2-pp2-recompute", "tp2-dp_shard2")  # by the second model, unless everything is asked for


def _table() -> dict[str, tuple[str, dict[str, Any]]]:
    rows = {f"llama/{name}": ("llama", degrees) for name, degrees in LAYOUTS.items()}
    rows |= {f"qwen3-tied/{name}": ("qwen3-tied", LAYOUTS[name]) for name in (LAYOUTS if EVERYTHING else REPEATED)}
    if EVERYTHING:
        rows |= {f"llama4_text/{name}": ("llama4_text", LAYOUTS[name]) for name in ("tp4", "tp2-pp2", "tp2-dp_shard2")}
    return rows | {f"{model}/tp2": (model, LAYOUTS["tp2"]) for model in FAMILIES}


TABLE = _table()
# All rows in float64, where nothing hides; in fp32 Llama's alone, with either optimizer.
CASES = [(row, "float64") for row in TABLE]
FP32_ROWS = {"sgd": ("llama/tp2",), "adamw": ("llama/tp4",)}
CASES += [(row, kind) for row in TABLE for kind, rows in FP32_ROWS.items() if row in rows or EVERYTHING]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plain = {name: make_model(tmp_path_factory.mktemp(name), name) for name in PLAIN}
    return plain | {
        name: make_family(tmp_path_factory.mktemp(name), name, **changes) for name, changes in FAMILIES.items()
    }


def _case(folders: dict[str, Path], row: str, kind: str) -> Case:
    model, degrees = TABLE[row]
    blocks = FAMILIES.get(model, {}).get("num_hidden_layers", 4)
    split = strategy(blocks, sequence_parallel=True, **degrees)
    return _of_kind(Case(folders[model], split, ROWS, eval_batch_size=5), model, kind)


def _of_kind(case: Case, model: str, kind: str) -> Case:
    changes: dict[str, dict[str, Any]] = {
        "sgd": {},
        "adamw": {"train": ADAMW, "dtype": torch.float64 if model in BIASED_KEYS else torch.float32},
        "float64": {"dtype": torch.float64, "steps": 3},
    }
    return replace(case, **changes[kind])


@cache
def _reference(folder: Path, model: str, kind: str) -> Outcome:
    return reference(_of_kind(Case(folder, strategy(), ROWS, eval_batch_size=5), model, kind))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Table:
    return Table({(row, kind): _case(folders, row, kind) for row, kind in CASES})


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_22_equals_one_process(row: str, kind: str, outcomes: Table, note_error: Any) -> None:
    """Megatron-LM 1446, 443: a rank sees its positions alone, and every norm's gradient is that of all of them.

    ``assemble`` asks that all ranks hold the same bits of every parameter's gradient.
    """
    case = outcomes.cases[row, kind]
    want = _reference(case.folder, TABLE[row][0], kind)
    label = f"sequence {kind} {case.dtype}"
    assert_equal(outcomes[row, kind], want, note_error, label, case.train.optimizer)
