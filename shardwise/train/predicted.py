"""What the planner expected of a run beside what was measured, told at its end. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.status import update_status
from shardwise.units import format_bytes

WARM_UP = 1  # steps that do not count where there are more: the first one allocates and connects


class PredictionReport(Callback):
    """Tells predicted and measured step time and memory in a line, and leaves them in ``status.json``.

    ``step_seconds`` is the median over all steps but the first, ``memory_bytes`` the peak of the fullest process.
    """

    main_only = True
    may_stop = False

    def __init__(self, predicted: Mapping[str, float], say: Callable[[str], None]) -> None:
        self._predicted, self._say = predicted, say
        self._seconds: list[float] = []
        self._memory = 0

    def on_train_begin(self, info: RunInfo) -> None:
        self._folder: Path = info.output_dir

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if metrics["num_input_tokens"]:
            self._seconds.append(float(metrics["step_seconds"]))
        self._memory = max(self._memory, int(metrics["peak_memory_bytes"]))

    def on_train_end(self, reason: str | None) -> None:
        if not self._seconds:
            return
        counted = self._seconds[WARM_UP:] or self._seconds
        seconds, expected = median(counted), self._predicted
        update_status(
            self._folder,
            prediction={
                "predicted_step_seconds": expected["step_seconds"],
                "measured_step_seconds": seconds,
                "measured_steps": len(counted),
                "predicted_memory_bytes": expected["memory_bytes"],
                "measured_memory_bytes": self._memory,
            },
        )
        time = f"{expected['step_seconds']:.3g} s a step, measured {seconds:.3g} s (median of {len(counted)})"
        memory = f"{format_bytes(expected['memory_bytes'])} a process, measured {format_bytes(self._memory)} at most"
        self._say(f"predicted {time}; {memory}")
