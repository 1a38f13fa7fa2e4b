"""Interleaved pipelines, several stages on a rank, equal one process (fault case 19)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import ADAMW, SGD, Case, Outcome, build, reference, strategy
from tests.parallel.tables import Table, assert_equal

pytestmark = pytest.mark.slow

PP2: dict[str, Any] = {"schedule": "interleaved", "pp": 2, "virtual_stages": 2}
# name -> (model, blocks, rows of a step, what differs from two ranks with two stages each)
TABLE: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "8-blocks": ("llama", 8, 4, {}),
    "10-blocks": ("llama", 10, 4, {}),  # fault case 19: Megatron-LM 468 trained fewer
    "5-blocks": ("llama", 5, 4, {}),
    "tied": ("qwen3-tied", 8, 4, {}),
    "uneven": ("qwen3-tied", 8, 4, {"stages": (1, 4, 1, 2)}),
    "odd-rounds": ("llama", 8, 7, {}),  # rounds of 3, 2 and 2 micro-batches
    "two-rows": ("llama", 5, 4, {"micro_batch_size": 2}),
    "virtual4": ("qwen3-tied", 8, 4, {"virtual_stages": 4}),
    "recompute": ("qwen3-tied", 8, 4, {"recompute": -1}),
    "recompute-first": ("llama", 10, 4, {"recompute": 1}),
    "pp3": ("llama-tied", 8, 4, {"pp": 3}),
    "pp4": ("qwen3-tied", 8, 4, {"pp": 4}),
    "tp2": ("llama", 8, 4, {"tp": 2}),
    "tp2-tied-recompute": ("qwen3-tied", 5, 4, {"tp": 2, "recompute": -1}),
    "dp_shard2": ("llama", 10, 4, {"dp_shard": 2}),
    "dp_shard2-tied": ("llama-tied", 8, 8, {"dp_shard": 2}),
    "dp_shard2-zero3": ("qwen3-tied", 8, 4, {"dp_shard": 2, "reshard": True}),
    # With more than three stages on a rank torch gives some back between their passes.
    "dp_shard2-virtual4": ("llama", 8, 8, {"dp_shard": 2, "virtual_stages": 4, "reshard": True}),
    "dp_shard2-grouped": ("llama", 8, 4, {"dp_shard": 2, "gradient_aggregation_group": 1}),
    "dp_replicate2": ("llama", 5, 4, {"dp_replicate": 2}),
    "dp_replicate2-tied": ("qwen3-tied", 8, 4, {"dp_replicate": 2, "gradient_aggregation_group": 3}),
    "tp2-dp_shard2": ("qwen3-tied", 10, 4, {"tp": 2, "dp_shard": 2, "recompute": 1}),
    "hsdp2x2": ("llama", 8, 4, {"dp_replicate": 2, "dp_shard": 2}),
}
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"train": SGD},
    "adamw": {"train": ADAMW},
    "float64": {"train": SGD, "dtype": torch.float64, "steps": 2},
}


# All rows in float64, where nothing hides; some of them in fp32.
FP32_ROWS = {
    "sgd": ("10-blocks", "tp2", "dp_shard2-zero3"),
    "adamw": ("tied", "dp_shard2", "dp_replicate2-tied"),
}
CASES = [(row, kind) for kind in KINDS for row in TABLE if EVERYTHING or row in FP32_ROWS.get(kind, TABLE)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    root = tmp_path_factory.mktemp("interleaved")
    sizes = {(model, blocks) for model, blocks, _, _ in TABLE.values()}
    return {
        (model, blocks): make_model(root / f"{model}-{blocks}", model, num_hidden_layers=blocks)
        for model, blocks in sorted(sizes)
    }


def _case(folders: dict[tuple[str, int], Path], row: str, kind: str) -> Case:
    """Nine rows of changing length; each epoch ends with a batch of one row or two."""
    model, blocks, size, changes = TABLE[row]
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
    split = strategy(blocks, **(PP2 | changes))
    return Case(folders[model, blocks], split, rows, size, eval_batch_size=5, **KINDS[kind])


@cache
def _reference(folder: Path, size: int, kind: str) -> Outcome:
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
    return reference(Case(folder, strategy(), rows, size, eval_batch_size=5, **KINDS[kind]))


@pytest.fixture(scope="module")
def outcomes(folders: dict[tuple[str, int], Path]) -> Table:
    return Table({(row, kind): _case(folders, row, kind) for row, kind in CASES})


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_19_interleaved_equals_one_process(row: str, kind: str, outcomes: Table, note_error: Any) -> None:
    case, got = outcomes.cases[row, kind], outcomes[row, kind]
    assert len([name for name in got.weights if name.endswith("q_proj.weight")]) == TABLE[row][1]
    want = _reference(case.folder, case.global_batch_size, kind)
    assert_equal(got, want, note_error, f"interleaved {kind}", case.train.optimizer)


def _held(rank: int, case: Case) -> tuple[list[tuple[int, bool, bool]], list[str], int]:
    """This rank's stages, the parameters of its modules, and the bytes of their memory, buffers included."""
    model, _ = build(case)
    modules = [stage.model for stage in model.stages]
    names = [name for module in modules for name, _ in module.named_parameters(remove_duplicate=False)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    assert not any(t.is_meta for t in tensors)
    stages = [(stage.index, stage.is_first, stage.is_last) for stage in model.stages]
    return stages, names, sum(t.untyped_storage().nbytes() for t in tensors)


def test_a_rank_holds_its_blocks_alone(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama-tied", num_hidden_layers=10)
    case = Case(folder, strategy(10, **PP2), tuple(make_rows()))
    assert case.strategy.stages == (3, 3, 2, 2)
    (stages0, names0, bytes0), (stages1, names1, bytes1) = run_distributed(_held, 2, case)
    assert stages0 == [(0, True, False), (2, False, False)]
    assert stages1 == [(1, False, False), (3, False, True)]
    blocks = [
        sorted({int(n.split(".")[2]) for n in names if n.startswith("model.layers.")}) for names in (names0, names1)
    ]
    assert blocks == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]
    assert [n for n in names0 if "layers" not in n] == ["model.embed_tokens.weight"]
    assert [n for n in names1 if "layers" not in n] == ["model.norm.weight", "lm_head.weight"]
    plain = replace(case, strategy=strategy(10, pp=2))
    for held, (_, _, alone) in zip((bytes0, bytes1), run_distributed(_held, 2, plain), strict=True):
        assert abs(held - alone) <= 256  # five blocks either way; rotary frequencies once a stage
