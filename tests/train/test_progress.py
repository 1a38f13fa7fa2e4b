"""The line that a user sees of a step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.run import RunConfig
from shardwise.train.callbacks import RunInfo
from shardwise.train.progress import ProgressView, describe

STEP: dict[str, Any] = {
    "loss": 2.5,
    "grad_norm": 1.25,
    "lr": 5e-5,
    "tokens_per_second": 12345.6,
    "tflops_per_device": 0.0021,
    "mfu": None,
    "peak_memory_bytes": 2**30,
}
SKIPPED = STEP | {"loss": None, "grad_norm": None, "skipped": "loss nan, gradient norm nan in rows of lines 1-4"}


@pytest.mark.parametrize(("mfu", "shown"), [(None, "2.1 GFLOP/s a device  1.00"), (0.412, "device  MFU 41.2%  1.00")])
def test_speed_stands_on_every_line_and_mfu_where_it_is_known(mfu: float | None, shown: str) -> None:
    line = describe(STEP | {"mfu": mfu}, 65.0)
    assert line.startswith("loss 2.5000  norm 1.250  lr 5.00e-05  12.3K tokens/s  2.1 GFLOP/s")
    assert shown in line
    assert line.endswith("ETA 01:05")


def test_skipped_steps_are_told_whatever_the_interval_of_lines(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": "m", "log": {"steps": 2}})
    terminal = io.StringIO()
    view = ProgressView(terminal)
    view.on_train_begin(RunInfo(config, tmp_path, rank=0, world_size=1, first_step=0, total_steps=3, model=None))
    for step, line in enumerate((SKIPPED, STEP, STEP), 1):
        view.on_step_end(step, line)
    view.on_train_end("enough")
    warning, second, third, end = terminal.getvalue().splitlines()
    assert warning.startswith("warning: step 1 is skipped: loss nan, gradient norm nan in rows of lines 1-4")
    assert second.startswith("step 2/3  loss 2.5000")
    assert third.startswith("step 3/3  loss 2.5000")
    assert end == "ended: enough"
