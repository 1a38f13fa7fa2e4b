"""From which checkpoint a run goes on after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.checkpoint.listing import CHECKPOINTS
from shardwise.spec.run import RunConfig
from shardwise.train.identity import after_restart
from tests.checkpoint.fakes import fake_checkpoint


@pytest.mark.parametrize(("newest", "resume"), [(5, None), (10, None), (12, "auto")])
def test_a_restart_goes_on_from_what_the_run_itself_has_saved(tmp_path: Path, newest: int, resume: str | None) -> None:
    """The run began from step 10 of a branch that had been set aside; what is older is of the branch that it left."""
    fake_checkpoint(tmp_path / CHECKPOINTS, newest, {})
    named = fake_checkpoint(tmp_path / CHECKPOINTS / "superseded", 10, {})
    run = RunConfig(model="m", resume=str(named))
    assert after_restart(run, tmp_path).resume == (resume or str(named))
    assert after_restart(RunConfig(model="m"), tmp_path).resume == "auto"


def test_a_run_that_has_saved_nothing_begins_as_it_began(tmp_path: Path) -> None:
    run = RunConfig(model="m", resume=str(fake_checkpoint(tmp_path / "other", 10, {})))
    assert after_restart(run, tmp_path) is run
