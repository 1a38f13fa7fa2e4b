"""Packed rows: the loss, norm, gradients and weights of the rows apart, under every kind of split and attention.

The reference is one process of plain transformers on padded rows with their attention mask: nothing is packed there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.spec import tolerance
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.families import FAMILIES, make_family
from tests.parallel.harness import Case, Errors, Outcome, assemble, compare, loader_of, reference, run_cases, strategy

pytestmark = pytest.mark.slow

ROWS = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9, 5, 1)))  # the second step has 3 rows
SIZE, LENGTH = 8, 24
FLOAT64 = 1e-12  # relative; what is packed is computed by the same sums
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "eager": {},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp_shard2": {"dp_shard": 2},
    "dp_replicate2-recompute": {"dp_replicate": 2, "recompute": -1},
    "tp2-pp2": {"tp": 2, "pp": 2},
}
# Sliding windows with a softcap, learned positions, experts, latent attention, heads side by side.
KINDS = ("mistral", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_neox")
LEAKS = ("bloom", "falcon-alibi")  # a mask of their own: refused, see tests/models/test_packing.py


def _table() -> dict[str, tuple[str, str]]:
    table = {f"llama/{layout}": ("llama", layout) for layout in LAYOUTS}
    kinds = [name for name in FAMILIES if name not in LEAKS] if EVERYTHING else KINDS
    return table | {f"{model}/one": (model, "one") for model in kinds}


TABLE = _table()
CASES = [(row, "float64") for row in TABLE] + [(f"llama/{layout}", "fp32") for layout in ("one", "eager", "tp2-pp2")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = {model for model, _ in TABLE.values()} - {"llama"}
    folders = {name: make_family(tmp_path_factory.mktemp(name), name) for name in sorted(names)}
    return folders | {"llama": make_model(tmp_path_factory.mktemp("llama"), "llama")}


def _case(folder: Path, layout: str, kind: str) -> Case:
    case = Case(
        folder,
        strategy(**LAYOUTS[layout]),
        ROWS,
        SIZE,
        pack_length=LENGTH,
        attention="eager" if layout == "eager" else None,
        eval_batch_size=5,
    )
    return replace(case, dtype=torch.float64, steps=2) if kind == "float64" else replace(case, steps=4)


@cache
def _reference(folder: Path, kind: str) -> Outcome:
    return reference(replace(_case(folder, "one", kind), pack_length=None))


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[tuple[str, str], Errors]:
    """Errors by case; those of a world size share their ranks."""
    cases = {key: _case(folders[TABLE[key[0]][0]], TABLE[key[0]][1], key[1]) for key in CASES}
    errors: dict[tuple[str, str], Errors] = {}
    for size in sorted({case.strategy.world_size for case in cases.values()}):
        chosen = {key: case for key, case in cases.items() if case.strategy.world_size == size}
        parts = run_distributed(run_cases, size, list(chosen.values()), timeout=240)
        for place, (key, case) in enumerate(chosen.items()):
            got, want = assemble([rank[place] for rank in parts]), _reference(case.folder, key[1])
            errors[key] = compare(got, want)
            assert got.eval_loss == pytest.approx(want.eval_loss, rel=tolerance.FP32_LOSS)
    return errors


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_equals_the_rows_apart(row: str, kind: str, found: dict[tuple[str, str], Errors], note_error: Any) -> None:
    errors = found[row, kind]
    for name in ("loss", "norm", "gradient", "weight"):
        note_error(f"packed {kind} {name}", getattr(errors, name))
    sharp = kind == "float64"
    assert errors.loss <= (FLOAT64 if sharp else tolerance.FP32_LOSS)
    assert errors.norm <= (FLOAT64 if sharp else tolerance.FP32_NORM)
    assert errors.gradient <= (FLOAT64 if sharp else tolerance.FP32_GRADIENT), errors.worst_gradient
    assert errors.weight <= (FLOAT64 if sharp else tolerance.SGD_WEIGHTS)


def test_the_rows_were_packed(folders: dict[str, Path]) -> None:
    """What is compared above is not the rows apart once more."""

    class OneRank:
        data_rank = 0

    batch = next(loader_of(_case(folders["llama"], "one", "fp32"), OneRank()).batches())  # type: ignore[arg-type]
    assert (batch.num_rows, batch.input_ids.numel() // batch.input_ids.shape[-1]) == (8, 4)
    assert batch.fill_rate > 0.85
