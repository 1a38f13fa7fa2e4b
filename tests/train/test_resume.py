"""A run that is interrupted again and again, under another layout or batch each time: the very next row follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.tolerance import FP32_LOSS
from tests.fixtures import make_model, make_rows
from tests.train.runs import Result, run

pytestmark = pytest.mark.slow
BATCH, EPOCH_STEPS, STEPS = 4, 5, 8  # 20 rows: the third epoch is not begun
BASE = ["train.lr_scheduler=constant", "train.learning_rate=0.001", "train.seed=3", "log.rows=true"]
SAVING = ["save.strategy=steps", "save.steps=1", "save.keep=9", "save.export=false"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "llama")
    rows = make_rows(tuple(4 + index % 7 for index in range(BATCH * EPOCH_STEPS)))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _run(inputs: Path, output_dir: Path, steps: int, *more: str, rows: int = BATCH) -> Result:
    given = [f"train.global_batch_size={rows}", f"train.max_steps={steps}", "resume=auto", *more]
    result = run(inputs, output_dir, [*BASE, *SAVING, *given])
    assert set(result.errors) == {""}
    return result


def _hashes(lines: list[dict[str, Any]]) -> list[str]:
    return [each for line in lines for each in line["row_hashes"]]


def test_58_59_rows_and_losses_are_those_of_a_run_that_was_not_interrupted(inputs: Path, tmp_path: Path) -> None:
    whole = _run(inputs, tmp_path / "whole", STEPS).metrics()
    for steps, layout in ((1, ["tp=1"]), (2, ["dp_shard=2"]), (3, ["tp=2", "micro_batch_size=1"])):
        _run(inputs, tmp_path / "cut", steps, *layout)
    shutil.copytree(tmp_path / "cut", tmp_path / "wider", symlinks=True)

    lines = _run(inputs, tmp_path / "cut", STEPS, "dp_replicate=2", "micro_batch_size=1").metrics()
    assert _hashes(lines) == _hashes(whole)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole], rel=FP32_LOSS)

    # Twice the batch from row 13 on: nothing is left out, nothing comes twice, also over the end of the epoch.
    wider = _run(inputs, tmp_path / "wider", 5, rows=2 * BATCH)
    assert _hashes(wider.metrics()) == _hashes(whole[: EPOCH_STEPS + 2])
    assert f"train.global_batch_size: {BATCH} -> {2 * BATCH}" in wider.terminal
