"""How much room a run is expected to need."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from shardwise.errors import CheckpointError
from shardwise.spec.run import RunConfig
from shardwise.train import keeping
from shardwise.train.keeping import CheckpointKeeper
from shardwise.train.saving import TrainState
from tests.checkpoint.fakes import fake_checkpoint


@pytest.mark.parametrize(
    ("there", "best", "needed"),
    [
        ((), "no", 3),
        ((), "eval_loss", 4),  # two newest, the best, and the new one before an old one goes
        ((10,), "no", 2),
        ((10, 20), "no", 1),
        ((10, 30, 40), "no", 2),  # those beyond step 20 are set aside, and take their room with them
    ],
)
def test_checkpoints_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[int, ...], best: str, needed: int
) -> None:
    for step in there:
        fake_checkpoint(tmp_path, step, {})
    saving = {"strategy": "steps", "steps": 1, "keep": 2, "best": best, "export": False}
    evaluating = {"strategy": "steps", "steps": 1}
    run = RunConfig.model_validate({"model": "m", "save": saving, "eval": evaluating})
    keeper = CheckpointKeeper(run, tmp_path, 0, MagicMock(), MagicMock(), MagicMock())
    keeper.__dict__["num_bytes"] = 100
    monkeypatch.setattr(keeper, "_sum", lambda values: values)
    monkeypatch.setattr(keeping, "free_bytes", lambda folder: 100 * needed)
    keeper.check_room(TrainState(step=20), total_steps=40)
    monkeypatch.setattr(keeping, "free_bytes", lambda folder: 100 * needed - 1)
    with pytest.raises(CheckpointError, match=f"needs {100 * needed} B"):
        keeper.check_room(TrainState(step=20), total_steps=40)
