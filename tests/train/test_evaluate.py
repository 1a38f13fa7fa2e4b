"""Evaluations that a script asks for, before and after the training: told as the run's own are, on every rank."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import apply_overrides, load_yaml
from shardwise.front.resolve import prepare
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import dump_run
from shardwise.testing import run_distributed
from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.context import WorkerContext
from shardwise.train.early_stopping import EarlyStopping
from shardwise.train.metrics import MetricsFile
from shardwise.train.trackers import make_trackers
from tests.train.runs import make_inputs

STEPS = 2


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_train_begin(self, info: RunInfo) -> None:
        self.notes.append("begin")

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.notes.append(f"step {step}")

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        self.notes.append(f"evaluated {metrics['step']} in epoch {metrics['epoch']}")

    def on_train_end(self, reason: str | None) -> None:
        self.notes.append("end")

    def on_exception(self, error: BaseException) -> None:
        self.notes.append(f"failed {type(error).__name__}")


class _Never:
    def requested(self) -> str | None:
        return None


def _rank(rank: int, output_dir: Path, world_size: int) -> tuple[list[float], list[str], str]:
    from shardwise.train.worker import make_trainer

    terminal = io.StringIO()
    context = WorkerContext(output_dir, rank, rank, world_size, _Never(), terminal if rank == 0 else None)
    notes = Notes()
    run = parse_run(load_yaml(output_dir / "run.yaml"))
    trainer = make_trainer(run, Plan.load(output_dir / "plan.json"), context, callbacks=[notes])
    first = trainer.evaluate()
    trainer.train()
    second = trainer.evaluate()
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    return [first[0], second[0]], notes.notes, terminal.getvalue()


@pytest.mark.slow
def test_lines_and_callbacks_before_and_after_training(tmp_path: Path) -> None:
    inputs, output_dir = make_inputs(tmp_path), tmp_path / "out"
    keys = [f"model={inputs / 'model'}", f"data.train={inputs / 'rows.jsonl'}", f"data.eval={inputs / 'rows.jsonl'}"]
    keys += [f"output_dir={output_dir}", "device=cpu", "pp=2", "train.global_batch_size=4", "train.epochs=1"]
    keys += ["train.learning_rate=0.01", "eval.strategy=epoch", "save.export=false"]
    config, plan = prepare(apply_overrides({}, keys))
    output_dir.mkdir()
    (output_dir / "run.yaml").write_text(dump_run(config))
    plan.save(output_dir / "plan.json")
    ranks = run_distributed(_rank, 2, output_dir, 2)
    (before, after), notes, terminal = ranks[0]
    assert ranks[1][:2] == ([before, after], notes)
    assert after < before
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(line["step"], line["epoch"], line["eval_loss"]) for line in lines if line["kind"] == "eval"]
    assert evaluations == [(0, 0, before), (STEPS, 0, after), (STEPS, 0, after)]
    steps = [f"step {step}" for step in range(1, STEPS + 1)]
    told = f"evaluated {STEPS} in epoch 0"
    assert notes == ["begin", "evaluated 0 in epoch 0", *steps, told, "end", told]
    assert terminal.count(f"evaluation after step {STEPS}: loss {after:.4f}") == 2


def test_an_evaluation_before_the_first_step_of_a_resumed_run_cuts_nothing(tmp_path: Path) -> None:
    """Lines behind the checkpoint are of steps that this run has not made anew yet, and perhaps never will."""
    before = [{"kind": "train", "step": step} for step in range(1, 5)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in before))
    metrics = MetricsFile()
    metrics.on_train_begin(RunInfo(None, tmp_path, 0, 1, first_step=2, total_steps=9, model=None))  # type: ignore[arg-type]
    evaluated = {"kind": "eval", "step": 2, "eval_loss": 1.5}
    metrics.on_evaluate(evaluated)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*before, evaluated]
    metrics.on_step_end(3, {"kind": "train", "step": 3, "loss": 1.0})
    made = {"kind": "train", "step": 3, "loss": 1.0}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*before[:2], evaluated, made]


def test_a_second_evaluation_after_the_same_step_does_not_count_for_early_stopping() -> None:
    callback = EarlyStopping(2)
    for step, loss in ((0, 3.0), (0, 3.0), (0, 3.0), (1, 3.5), (1, 3.5)):
        callback.on_evaluate({"step": step, "eval_loss": loss})
    assert callback.stop_reason is None
    again = EarlyStopping(2)
    again.load_state_dict(callback.state_dict())
    again.on_evaluate({"step": 1, "eval_loss": 3.5})
    assert again.stop_reason is None
    again.on_evaluate({"step": 2, "eval_loss": 3.5})
    assert again.stop_reason is not None


def test_a_tracker_whose_run_has_ended_says_where_the_evaluation_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[Any] = []
    service = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=lambda *args, **more: logged.append(args), finish=lambda **more: None)
    service.init = lambda **more: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", service)
    (tracker,) = make_trackers(("wandb",), {})
    config = parse_run({"model": "m"})
    tracker.on_train_begin(RunInfo(config, tmp_path, 0, 1, first_step=0, total_steps=9, model=None))
    line = {"kind": "eval", "step": 0, "eval_loss": 2.0}
    tracker.on_evaluate(line)
    tracker.on_train_end(None)
    tracker.on_evaluate(line)
    assert logged == [({"eval/eval_loss": 2.0},)]
    assert "this evaluation is in metrics.jsonl alone" in capsys.readouterr().err
