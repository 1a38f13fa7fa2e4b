"""Callbacks: code that a run calls at its begin, after steps, evaluations and checkpoints, and at its end.

Imports no torch, so that whoever only names a callback does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shardwise.spec.run import RunConfig

Hook = Literal[
    "on_train_begin",
    "on_step_begin",
    "on_step_end",
    "on_evaluate",
    "on_epoch_end",
    "on_save",
    "on_train_end",
    "on_exception",
]


class CallbackError(RuntimeError):
    """A callback raised; the message names it and the hook, the cause is what it raised."""


@dataclass(frozen=True)
class RunInfo:
    """What a callback is told of its run.

    Attributes:
        run: the resolved configuration.
        output_dir: where results go.
        rank: this process, 0 to ``world_size - 1``.
        first_step: steps that were done before this start: 0, or those of the checkpoint.
        total_steps: number of the last step.
        model: this rank's part of the model (:class:`shardwise.parallel.model.ParallelModel`).
    """

    run: RunConfig
    output_dir: Path
    rank: int
    world_size: int
    first_step: int
    total_steps: int
    model: Any


class Callback:
    """Override the hooks that you need; each does nothing here.

    Hooks run on every rank, in the same order, because no rank holds the whole model: what reads weights or
    gradients of a split model takes a collective, and a collective that only rank 0 enters never ends. So every
    rank must be given the same callbacks. A callback that writes files or talks to a service sets ``main_only``.

    An exception of a hook ends the run (exit status 3) and names the callback, unless ``optional`` is set.
    """

    main_only: ClassVar[bool] = False
    """Call the hooks on rank 0 alone. They must not use collectives then."""

    optional: ClassVar[bool] = False
    """An exception is reported once and switches the callback off; the run goes on."""

    may_stop: ClassVar[bool] = True
    """It may call :meth:`stop`. Where any callback may, the ranks exchange one number after each step."""

    stop_reason: str | None = None

    @property
    def name(self) -> str:
        """What messages and checkpoints call it."""
        return type(self).__name__

    def stop(self, reason: str) -> None:
        """Ask for the end of the run after the step that has just been made; one rank that asks is enough.

        It is a regular end: a checkpoint if ``save.strategy`` is not ``no``, the export, exit status 0.

        Args:
            reason: one line, for the terminal and for ``reason`` in ``status.json``.
        """
        assert self.may_stop, f"{self.name} has said that it never stops a run"
        self.stop_reason = reason

    def on_train_begin(self, info: RunInfo) -> None:
        """Weights are loaded, and no step of this start has been made, nor an evaluation."""

    def on_step_begin(self, step: int) -> None:
        """Step number ``step`` (from 1) is about to be made."""

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The step is made; ``metrics`` is its line of ``metrics.jsonl``.

        Loss, norm and counts are equal on all ranks, times are those of this rank.
        """

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        """An evaluation is made; ``metrics`` is its line: ``step``, ``epoch``, ``eval_loss``, ``eval_tokens``.

        It may be one that a script has asked for, before the first step or after :meth:`on_train_end`.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """The last step of epoch number ``epoch`` (from 0) is made, and its evaluation; its checkpoint is not."""

    def on_save(self, path: Path) -> None:
        """A checkpoint is complete."""

    def on_train_end(self, reason: str | None) -> None:
        """All is done, checkpoints and export too; ``reason`` says why before the last step, None if after it."""

    def on_exception(self, error: BaseException) -> None:
        """The run is about to fail on this rank. What this hook raises is reported and goes no further."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, as JSON; that of rank 0 is the one that is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, before :meth:`on_train_begin`, if the checkpoint has any."""
