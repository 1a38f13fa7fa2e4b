"""``train.early_stopping_patience``: the run ends when evaluations no longer get better. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.train.callbacks import Callback, RunInfo


class EarlyStopping(Callback):
    """Ends the run after ``patience`` evaluations in a row whose ``eval_loss`` is not below the best so far.

    Every rank decides by the same number. A NaN is no improvement. A second evaluation after the same step, which a
    script may ask for, tells nothing new.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._best, self._best_step, self._num_worse = math.inf, 0, 0
        self._last_step: int | None = None

    def on_train_begin(self, info: RunInfo) -> None:
        self._judge()  # a run that ended so and is resumed with the same patience ends at once

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == self._last_step:
            return
        self._last_step = metrics["step"]
        if metrics["eval_loss"] < self._best:
            self._best, self._best_step, self._num_worse = metrics["eval_loss"], metrics["step"], 0
        else:
            self._num_worse += 1
        self._judge()

    def _judge(self) -> None:
        if self._num_worse >= self._patience:
            best = "" if math.isinf(self._best) else f" below {self._best:.4f} of step {self._best_step}"
            self.stop(f"early stopping: {self._num_worse} evaluations in a row with no eval_loss{best}")

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isinf(self._best) else self._best
        return {
            "best": best,
            "best_step": self._best_step,
            "num_worse": self._num_worse,
            "last_step": self._last_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = math.inf if state["best"] is None else state["best"]
        self._best_step, self._num_worse = state["best_step"], state["num_worse"]
        self._last_step = state.get("last_step")
