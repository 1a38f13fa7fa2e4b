"""A run that a callback had ended, when its script begins again after a later failure. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.status import read_status


class EndsAgain(Callback):
    """Ends the run after the step after which it had ended before: the callback that did may not do so again, since it
    may have looked at the time, or at steps that are not made anew.

    Args:
        step: that was the last.
        reason: of the end.
    """

    main_only = True

    def __init__(self, step: int, reason: str) -> None:
        self._step, self._reason = step, reason

    def on_train_begin(self, info: RunInfo) -> None:
        self._end(info.first_step)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._end(step)

    def _end(self, step: int) -> None:
        if step >= self._step:
            self.stop(self._reason)


def end_of(output_dir: Path) -> tuple[int, str] | None:
    """The step after which a callback has ended the run in a folder, and its reason; None if none has."""
    status = read_status(output_dir)
    if status is None or status.ended_at is None or status.reason is None:
        return None
    return status.ended_at, status.reason
