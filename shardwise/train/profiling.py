"""``log.profile_steps``: a trace of chosen steps by torch's profiler, one file a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import profile, supported_activities

from shardwise.spec.ranges import StepRange
from shardwise.train.callbacks import Callback, RunInfo

FOLDER = "profile"


class StepProfiler(Callback):
    """Writes ``profile/steps-3-5-rank-0.json``, to be opened in chrome://tracing or Perfetto.

    A range of steps is one trace. A traced step takes longer than others.
    """

    may_stop = False

    def __init__(self, ranges: tuple[StepRange, ...], say: Callable[[str], None]) -> None:
        self._ranges, self._say = ranges, say
        self._profile: profile | None = None

    def on_train_begin(self, info: RunInfo) -> None:
        self._folder, self._rank = info.output_dir / FOLDER, info.rank
        past = [str(steps) for steps in self._ranges if steps.first <= info.first_step]
        if past:
            self._say(f"log.profile_steps: {', '.join(past)} began before step {info.first_step + 1}; not traced")

    def on_step_begin(self, step: int) -> None:
        for steps in self._ranges:
            if step == steps.first:
                self._current = steps
                self._profile = profile(activities=list(supported_activities()))
                self._profile.start()

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._profile is not None and step == self._current.last:
            self._write(self._current)

    def on_train_end(self, reason: str | None) -> None:
        if self._profile is not None:  # the run has ended inside of the range
            self._write(self._current)

    def on_exception(self, error: BaseException) -> None:
        self.on_train_end(None)

    def _write(self, steps: StepRange) -> None:
        assert self._profile is not None
        active, self._profile = self._profile, None
        active.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = trace_path(self._folder, steps, self._rank)
        active.export_chrome_trace(str(path))
        if self._rank == 0:
            self._say(f"traced steps {steps}: {path}")


def trace_path(folder: Path, steps: StepRange, rank: int) -> Path:
    """The file of a rank's trace."""
    return folder / f"steps-{steps}-rank-{rank}.json"
