"""What a run says of itself that was started again after a failure. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.context import Restart
from shardwise.train.status import update_status


class TellsRestart(Callback):
    """Tells, with the first step, how long the failure has kept the run from it."""

    main_only = True
    may_stop = False

    def __init__(self, restart: Restart, say: Callable[[str], None]) -> None:
        self._restart, self._say, self._is_told = restart, say, False

    def on_train_begin(self, info: RunInfo) -> None:
        self._folder = info.output_dir
        update_status(self._folder, restarts=self._restart.number)  # it may fail again before a step is made

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._is_told:
            return
        self._is_told = True
        seconds = round(time.time() - self._restart.failed_at, 3)
        update_status(self._folder, restart_seconds=seconds)
        of = f"{self._restart.number} of {self._restart.allowed}"
        self._say(f"restart {of}: step {step} is made, {seconds:.1f} s after the failure")
