"""``train.early_stopping_patience``: counted in evaluations, kept by checkpoints, told in every place."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from shardwise.data.batch import LoaderState
from shardwise.errors import CheckpointError
from shardwise.train import best as best_module
from shardwise.train.best import take_best
from shardwise.train.early_stopping import EarlyStopping
from shardwise.train.saving import TrainState
from shardwise.train.trainer import Trainer
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


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", "use_lora=true"])
def test_the_export_is_the_model_of_the_best_checkpoint(inputs: Path, tmp_path: Path, lora: str) -> None:
    """A learning rate that is too high makes every later evaluation worse than the first."""
    saving = ["save.strategy=steps", "save.steps=1", "save.best=eval_loss", "save.export=best", "save.keep=1"]
    rest = ["train.global_batch_size=4", "train.optimizer=sgd", "train.learning_rate=50", "train.max_grad_norm=0"]
    evaluation = [f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=steps", "eval.steps=1"]
    more = ["train.early_stopping_patience=2", "train.max_steps=9", "train.lr_scheduler=constant", "dp_shard=2"]
    result = run(inputs, tmp_path / "out", [*evaluation, *saving, *rest, *more, *([lora] if lora else [])])
    losses = {line["step"]: line["eval_loss"] for line in result.metrics("eval")}
    best = min(losses, key=lambda step: losses[step])
    assert best < result.status().step
    assert f"the model of step {best}, whose eval_loss is the lowest" in result.terminal

    export, model = tmp_path / "out" / "export", AutoModelForCausalLM.from_pretrained(inputs / "model")
    exported = PeftModel.from_pretrained(model, export) if lora else AutoModelForCausalLM.from_pretrained(export)
    assert _loss(exported, inputs / "rows.jsonl") == pytest.approx(losses[best], rel=1e-5)


def test_a_best_checkpoint_that_is_damaged_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of its weights is loaded: the model given here has none."""
    best = Path("checkpoints") / "step-00000003"
    monkeypatch.setattr(best_module, "from_rank_0", lambda _: best)
    monkeypatch.setattr(best_module, "damage_in", lambda _: "the content of its __0_0.distcp is another")
    with pytest.raises(CheckpointError, match=r"step-00000003.*is damaged: .*__0_0.distcp.*shardwise export"):
        take_best(Path("checkpoints"), None, TrainState(5))  # type: ignore[arg-type]


def test_an_evaluation_after_the_best_was_taken_is_one_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 6 ended epoch 2, and the model is that of step 3, which ended epoch 1."""
    trainer, told = object.__new__(Trainer), []
    trainer.state, trainer._exported = TrainState(6, 6, LoaderState(epoch=2)), TrainState(3, 3, LoaderState(epoch=1))
    trainer.callbacks = SimpleNamespace(call=lambda hook, values: told.append(dict(values)))  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "_begin", lambda: None)
    monkeypatch.setattr(trainer, "_measure", lambda: (1.5, 40))
    trainer.evaluate()
    trainer._exported = None
    trainer.evaluate()
    assert [(line["step"], line["epoch"]) for line in told] == [(3, 0), (6, 1)]


def _loss(model: torch.nn.Module, rows: Path) -> float:
    """Mean over the supervised tokens of all rows, row by row."""
    total, count = 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        targets = torch.tensor(row["labels"][1:])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


def _best(result: object) -> str:
    (first, *_) = result.metrics("eval")  # type: ignore[attr-defined]
    return f"{first['eval_loss']:.4f} of step 1"
