"""The order of what a step does, where a kill in between would tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shardwise.checkpoint.listing import complete_checkpoints
from shardwise.errors import SaveError
from shardwise.spec.run import RunConfig
from shardwise.train import trainer as module
from shardwise.train.identity import RunIdentity
from shardwise.train.saving import TrainState
from shardwise.train.step import NonFiniteLossError
from shardwise.train.trainer import Trainer
from tests.checkpoint.fakes import fake_checkpoint


def test_a_branch_that_was_left_is_set_aside_before_the_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When callbacks have discarded what was there before, a restart takes the newest checkpoint for its own."""
    for step in (10, 12):
        fake_checkpoint(tmp_path / "checkpoints", step, {})
    seen: list[tuple[str, Any]] = []

    def call(hook: str, *arguments: Any) -> None:
        seen.append((hook, [path.name for path in complete_checkpoints(tmp_path / "checkpoints")]))

    monkeypatch.setattr(module, "train_step", lambda *arguments: SimpleNamespace(loss=1.0, notes=None, skipped=None))
    trainer = Trainer.__new__(Trainer)
    trainer.__dict__ |= {"parts": MagicMock(), "policy": MagicMock(), "view": MagicMock(), "_keeper": MagicMock()}
    trainer.parts.context.rank, trainer.parts.context.world_size = 0, 1  # type: ignore[misc]
    trainer.parts.meter.peak_bytes.return_value = 0  # type: ignore[attr-defined]
    trainer.__dict__ |= {"folder": tmp_path, "state": TrainState(step=10), "losses": [], "total_steps": 20}
    trainer.__dict__ |= {"_learning_rate": lambda step: 0.1}
    trainer.__dict__ |= {"_compile_clock": None, "callbacks": SimpleNamespace(call=call), "_values": lambda *_: {}}
    trainer._step(MagicMock(rows=[]), first=10)
    assert seen == [("on_step_begin", ["step-00000010", "step-00000012"]), ("on_step_end", ["step-00000010"])]


def test_a_checkpoint_names_its_model_for_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, keeper = Trainer.__new__(Trainer), MagicMock()
    parts = MagicMock(run=RunConfig(model="model"), identity=RunIdentity("h", "adamw", "d"))
    trainer.__dict__ |= {"parts": parts, "_keeper": keeper, "state": TrainState(step=3), "_evaluated": None}
    trainer.__dict__ |= {"callbacks": SimpleNamespace(call=MagicMock(), state_dict=dict)}
    trainer.save()
    assert keeper.begin.call_args.args[1]["model_folder"] == str(tmp_path / "model")


def test_a_save_that_fails_while_a_loss_ends_the_run_is_told_beside_it() -> None:
    trainer, keeper = Trainer.__new__(Trainer), MagicMock()
    trainer.__dict__ |= {"_keeper": keeper, "callbacks": MagicMock()}
    error = NonFiniteLossError("step 2: loss nan")
    assert trainer._saved_before(error) is error
    keeper.finish.side_effect = SaveError("step-00000001", "could not be written")
    message = "step 2: loss nan; and of the save under way: step-00000001: could not be written"
    assert str(trainer._saved_before(error)) == message
