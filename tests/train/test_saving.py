"""Which checkpoint is gone on from, and what is said where none is whole."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from shardwise.checkpoint.listing import MANIFEST_FILE
from shardwise.errors import CheckpointError
from shardwise.spec.run import RunConfig
from shardwise.train import saving
from shardwise.train.identity import check_resume
from tests.checkpoint.fakes import fake_checkpoint


def test_auto_does_not_begin_anew_over_damaged_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "from_rank_0", lambda make: make())
    run = RunConfig(model="m", resume="auto")
    (tmp_path / ".step-00000009.draft").mkdir()
    assert saving.intact_checkpoint(run, tmp_path) == (None, ["step-00000009: its save came to no end"])
    older, newer = (fake_checkpoint(tmp_path, step, {}) for step in (3, 6))
    (newer / MANIFEST_FILE).unlink()
    assert saving.intact_checkpoint(run, tmp_path)[0] == older
    (older / "__0_0.distcp").write_text("[]")
    with pytest.raises(CheckpointError) as caught:
        saving.intact_checkpoint(run, tmp_path)
    assert "step-00000009" not in str(caught.value)
    reasons = f"step-00000006: it has no {MANIFEST_FILE}; step-00000003: the content of its __0_0.distcp"
    assert reasons in str(caught.value)
    check_resume(run, MagicMock(), tmp_path / "none")
    (older / MANIFEST_FILE).unlink()
    named = run.model_copy(update={"resume": str(older)})
    with pytest.raises(CheckpointError, match=r"a damaged checkpoint: its \.metadata is damaged"):
        saving.intact_checkpoint(named, tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole \(step-00000006: .*; step-00000003: it has no"):
        check_resume(run, MagicMock(), tmp_path)  # before a worker is started
