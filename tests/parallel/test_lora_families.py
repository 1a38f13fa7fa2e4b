"""Adapters on models of other architectures equal plain peft in one process: fused weights, experts, Conv1D."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.spec import tolerance
from shardwise.spec.run import LoraConfig
from shardwise.testing import run_distributed
from tests.fixtures import make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import assemble, compare, strategy
from tests.parallel.lora_harness import LoraCase, LoraPart, make_adapter, reference, run_cases

pytestmark = pytest.mark.slow

LORA = LoraConfig(r=4, alpha=8.0)
# Plain peft's "all-linear" adapts the fused tensors of experts too, which are no modules.
ATTENTION = LoraConfig(r=4, alpha=8.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
SPLIT_BY_TENSOR = ("gpt_neox", "gpt_neox-serial", "gemma2", "phi", "phi3", "glm", "olmo2", "starcoder2")
OTHERS = ("gpt2", "mixtral", "qwen3_moe")
TABLE: list[tuple[str, str]] = [
    *[(family, "tp2") for family in SPLIT_BY_TENSOR],
    *[(family, layout) for family in ("gpt_neox", "gemma2", *OTHERS) for layout in ("pp2", "dp_shard2")],
]
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp_shard2": {"dp_shard": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    made = {family: make_family(root / family, family) for family in (*SPLIT_BY_TENSOR, *OTHERS)}
    return made | {f"{f}+lora": make_adapter(folder, root / f"{f}+lora", _lora(f)) for f, folder in made.items()}


def _lora(family: str) -> LoraConfig:
    return ATTENTION if family in ("mixtral", "qwen3_moe") else LORA


def _case(folders: dict[str, Path], family: str, layout: str) -> LoraCase:
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9), vocab_size=131))
    split = strategy(**LAYOUTS.get(layout, {}))
    adapter = folders[f"{family}+lora"]
    return LoraCase(folders[family], split, rows, 4, 2, dtype=torch.float64, lora=_lora(family), adapter=adapter)


@pytest.fixture(scope="module")
def parts(folders: dict[str, Path]) -> Any:
    @cache
    def run() -> dict[tuple[str, str], list[LoraPart]]:
        by_rank = run_distributed(run_cases, 2, [_case(folders, *row) for row in TABLE], timeout=280)
        return {row: [rank[i] for rank in by_rank] for i, row in enumerate(TABLE)}

    return run


@pytest.mark.parametrize("row", TABLE, ids="/".join)
def test_equals_plain_peft(row: tuple[str, str], folders: dict[str, Path], parts: Any, note_error: Any) -> None:
    want = reference(_case(folders, row[0], "one"))
    ranks = parts()[row]
    errors = compare(assemble(ranks), want)
    note_error("lora families gradient", errors.gradient)
    assert all(part.frozen_kept for part in ranks)
    assert errors.loss <= tolerance.FLOAT64_LOSS
    assert errors.norm <= tolerance.FLOAT64_GRADIENT
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.FLOAT64_GRADIENT
