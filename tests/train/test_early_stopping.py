"""``train.early_stopping_patience``: counted in evaluations, kept by checkpoints, told in every place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardwise.train.early_stopping import EarlyStopping
from tests.train.runs import make_inputs, run


def _after(patience: int, losses: list[float]) -> EarlyStopping:
    callback = EarlyStopping(patience)
    for step, loss in enumerate(losses, 1):
        callback.on_evaluate({"step": step, "eval_loss": loss})
    return callback


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([3.0, 2.0, 1.0], False),
        ([1.0, 2.0], False),
        ([1.0, 2.0, 1.5], True),
        ([1.0, 1.0, 1.0], True),
        ([1.0, 2.0, 0.9, 2.0], False),
        ([1.0, math.nan, math.nan], True),
        ([math.nan, math.nan], True),
    ],
)
def test_two_evaluations_in_a_row_without_a_lower_loss(losses: list[float], stops: bool) -> None:
    assert bool(_after(2, losses).stop_reason) == stops


def test_the_reason_names_the_best() -> None:
    reason = _after(2, [2.0, 1.25, 3.0, 1.5]).stop_reason
    assert reason == "early stopping: 2 evaluations in a row with no eval_loss below 1.2500 of step 2"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _overrides(inputs: Path, patience: int, *more: str) -> list[str]:
    """Learning rate 0, so that every evaluation after the first is no better."""
    evaluation = [f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=steps", "eval.steps=1"]
    saving = ["save.strategy=steps", "save.steps=3"]
    rest = ["train.learning_rate=0", "train.global_batch_size=4", f"train.early_stopping_patience={patience}"]
    return [*evaluation, *saving, *rest, *more]


@pytest.mark.slow
def test_a_run_ends_in_good_order_and_a_resumed_one_at_the_same_step(inputs: Path, tmp_path: Path) -> None:
    whole = run(inputs, tmp_path / "whole", _overrides(inputs, 4, "pp=2", "train.max_steps=20"))
    assert whole.returned == [{}, {}]
    assert whole.status().step == 5
    assert whole.status().reason == f"early stopping: 4 evaluations in a row with no eval_loss below {_best(whole)}"
    assert whole.status().checkpoint == "checkpoints/step-00000005"
    assert (whole.output_dir / "export").is_dir()
    assert "ended: early stopping" in whole.terminal

    run(inputs, tmp_path / "cut", _overrides(inputs, 4, "train.max_steps=3"))
    resumed = run(inputs, tmp_path / "cut", _overrides(inputs, 4, "tp=2", "train.max_steps=20", "resume=auto"))
    assert [line["step"] for line in resumed.metrics()] == [1, 2, 3, 4, 5]
    assert resumed.status().step == 5

    again = run(inputs, tmp_path / "cut", _overrides(inputs, 4, "train.max_steps=20", "resume=auto"))
    assert again.status().step == 5
    assert "ended: early stopping" in again.terminal
    longer = run(inputs, tmp_path / "cut", _overrides(inputs, 6, "train.max_steps=20", "resume=auto"))
    assert longer.status().step == 7


def _best(result: object) -> str:
    (first, *_) = result.metrics("eval")  # type: ignore[attr-defined]
    return f"{first['eval_loss']:.4f} of step 1"
