"""Tables that leave more whole and move less (``strategy.tp_whole``): the numbers of one process all the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.models.build import build_on_meta
from shardwise.parallel.tensor import proven_table
from shardwise.tensor.table import Style
from tests.fixtures import make_model, make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import Case, Outcome, known_tables, reference, strategy
from tests.parallel.tables import Table, assert_equal

pytestmark = pytest.mark.slow

ROWS = tuple(make_rows((4, 6, 8, 11, 12, 14, 16, 16, 9)))
# What a row leaves whole in a block, and what it splits.
ROWS_OF_TABLE: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Style]]] = {
    "llama/attention": (
        "llama",
        {"tp": 2, "tp_whole": 0.41},
        ("self_attn.q_proj", "self_attn.o_proj"),
        {"mlp.gate_proj": Style.COLUMN, "mlp.down_proj": Style.ROW},
    ),
    "llama/attention-sequence": (
        "llama",
        {"tp": 2, "tp_whole": 0.41, "sequence_parallel": True},
        ("self_attn.q_proj", "self_attn.o_proj"),
        {"mlp.gate_proj": Style.COLUMN, "mlp.down_proj": Style.ROW},
    ),
    "qwen3_moe/attention": (
        "qwen3_moe",
        {"tp": 2, "tp_whole": 0.41},
        ("self_attn.q_proj", "self_attn.o_proj"),
        {"mlp.experts": Style.EXPERTS},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    moe = make_family(tmp_path_factory.mktemp("moe"), "qwen3_moe", num_hidden_layers=2)
    return {"llama": make_model(tmp_path_factory.mktemp("llama"), "llama"), "qwen3_moe": moe}


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Table:
    cases = {}
    for row, (model, degrees, _, _) in ROWS_OF_TABLE.items():
        split = strategy(4 if model == "llama" else 2, **degrees)
        cases[row, "float64"] = Case(folders[model], split, ROWS, steps=3, dtype=torch.float64, eval_batch_size=5)
    return Table(cases)


@cache
def _reference(folder: Path) -> Outcome:
    return reference(Case(folder, strategy(), ROWS, steps=3, dtype=torch.float64, eval_batch_size=5))


@pytest.mark.parametrize("row", ROWS_OF_TABLE)
def test_equals_one_process(row: str, outcomes: Table, note_error: Any) -> None:
    case = outcomes.cases[row, "float64"]
    assert_equal(outcomes[row, "float64"], _reference(case.folder), note_error, "tp_whole float64", "sgd")
    model, degrees, whole, split = ROWS_OF_TABLE[row]
    sequence, bound = degrees.get("sequence_parallel", False), degrees["tp_whole"]
    meta = build_on_meta(case.folder, None, torch.float64)
    table = proven_table(meta, 2, known_tables(), sequence=sequence, whole=bound)
    blocks = "model.layers.1"
    assert not any(table.is_cut(f"{blocks}.{name}.weight") for name in whole), model
    assert {name: table.style(f"{blocks}.{name}") for name in split} == split
