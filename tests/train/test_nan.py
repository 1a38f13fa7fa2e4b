"""``train.on_nan`` with rows and weights that really give NaN or infinity: every rank decides alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.spec.run import TrainConfig
from shardwise.spec.tolerance import FP32_LOSS, SGD_WEIGHTS
from shardwise.train.step import MAX_SKIPS_IN_A_ROW
from tests.fixtures import make_model, make_rows
from tests.parallel.harness import Case, reference, strategy
from tests.train.runs import run

pytestmark = pytest.mark.slow
POISON = 130  # the id whose embedding is infinite
ROWS = make_rows(vocab_size=130)
SGD = TrainConfig(optimizer="sgd", learning_rate=0.05, lr_scheduler="constant")
MATHS = ["train.optimizer=sgd", "train.learning_rate=0.05", "train.lr_scheduler=constant"]
BASE = [*MATHS, "data.shuffle=false", "train.global_batch_size=4"]
LAYOUTS = [["tp=2"], ["pp=2"], ["dp_shard=2"], ["dp_replicate=2"], ["tp=2", "pp=2"]]


def _inputs(folder: Path, rows: list[dict[str, Any]], change: dict[str, tuple[int, ...]]) -> Path:
    """A model in which elements of some weights are infinite, and rows."""
    make_model(folder / "model", "llama")
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    for name, place in change.items():
        weights[name][place] = torch.inf
    save_file(weights, path, {"format": "pt"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _poisoned(rows: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    ids = list(rows[index]["input_ids"])
    ids[0] = POISON
    return [*rows[:index], rows[index] | {"input_ids": ids}, *rows[index + 1 :]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_skipped_step_changes_nothing(tmp_path: Path, layout: list[str]) -> None:
    """Three epochs of two steps; one row makes every first step NaN. What is left equals a run without these steps."""
    inputs = _inputs(tmp_path, _poisoned(ROWS, 2), {"model.embed_tokens.weight": (POISON,)})
    result = run(inputs, tmp_path / "out", [*BASE, *layout, "train.epochs=3", "train.on_nan=skip"])
    assert set(result.errors) == {""}
    lines = result.metrics()
    assert [line["loss"] is None for line in lines] == [True, False] * 3
    for line in lines[::2]:
        assert line["grad_norm"] is None
        assert line["skipped"] == "loss nan, gradient norm nan in rows of lines 1-4"
        assert line["lines"] == [1, 2, 3, 4]
    assert result.terminal.count("is skipped: loss nan") == 3
    want = reference(Case(inputs / "model", strategy(), tuple(ROWS[4:]), 4, 3, SGD))
    assert [line["loss"] for line in lines[1::2]] == pytest.approx(want.losses, rel=FP32_LOSS)
    exported = load_file(result.output_dir / "export" / "model.safetensors")
    for name, value in want.weights.items():
        finite = value.isfinite()
        assert torch.equal(exported[name].isfinite(), finite)
        assert (exported[name] - value)[finite].norm() <= SGD_WEIGHTS * value[finite].norm()


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_stop_names_step_loss_norm_and_rows_on_every_rank(tmp_path: Path, layout: list[str]) -> None:
    inputs = _inputs(tmp_path, _poisoned(ROWS, 6), {"model.embed_tokens.weight": (POISON,)})
    saving = ["save.strategy=steps", "save.steps=1"]
    result = run(inputs, tmp_path / "out", [*BASE, *layout, "train.epochs=3", *saving])
    message = "NonFiniteLossError: step 2: loss nan, gradient norm nan in rows of lines 5-8"
    assert set(result.errors) == {message}
    assert [line["step"] for line in result.metrics()] == [1]
    assert result.status().checkpoint == "checkpoints/step-00000001"
    assert not (result.output_dir / "export").exists()


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_an_infinite_weight_of_one_rank_ends_the_run_after_a_row_of_skips(tmp_path: Path, layout: list[str]) -> None:
    """The weight lies in the last block, on the last tensor rank alone."""
    inputs = _inputs(tmp_path, ROWS, {"model.layers.3.mlp.down_proj.weight": (0, 47)})
    result = run(inputs, tmp_path / "out", [*BASE, *layout, "train.epochs=9", "train.on_nan=skip"])
    (message,) = set(result.errors)
    assert message.startswith(f"NonFiniteLossError: step {MAX_SKIPS_IN_A_ROW + 1}: loss nan, gradient norm nan")
    assert message.endswith(f"{MAX_SKIPS_IN_A_ROW} steps before it were skipped in a row")
    assert [line["loss"] for line in result.metrics()] == [None] * MAX_SKIPS_IN_A_ROW


def test_a_learning_rate_that_explodes(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, ROWS, {})
    overrides = [*BASE, "tp=2", "train.epochs=3", "train.learning_rate=1e30", "train.max_grad_norm=null"]
    result = run(inputs, tmp_path / "out", overrides)
    (message,) = set(result.errors)
    assert message.startswith("NonFiniteLossError: step 2: loss ")


def test_steps_without_supervised_tokens_are_no_reason_to_stop(tmp_path: Path) -> None:
    """Case 8 of the published faults, as a run: more such steps in a row than may be NaN."""
    empty = [row | {"labels": [-100] * len(row["input_ids"])} for row in ROWS]
    inputs = _inputs(tmp_path, [*empty, *empty, *empty[:4], *ROWS[:4]], {})
    for policy in ("stop", "skip"):
        overrides = [*MATHS, "data.shuffle=false", "train.global_batch_size=1", "train.epochs=1", "pp=2"]
        result = run(inputs, tmp_path / policy, [*overrides, f"train.on_nan={policy}"])
        assert set(result.errors) == {""}
        assert [line["loss"] is None for line in result.metrics()] == [True] * 20 + [False] * 4
        assert result.metrics()[3]["skipped"] == "no supervised token in row of line 4"
