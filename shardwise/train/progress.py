"""What the user sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shardwise.train.callbacks import Callback, RunInfo
from shardwise.units import format_bytes, format_count, format_flops, format_seconds


class ProgressView(Callback):
    """Shows steps, evaluations and checkpoints on rank 0's terminal (``terminal`` is None on the other ranks)."""

    main_only = True
    may_stop = False

    def __init__(self, terminal: TextIO | None) -> None:
        self._terminal = terminal
        self._bar: Progress | None = None

    def on_train_begin(self, info: RunInfo) -> None:
        self._total, self._first, self._log_steps = info.total_steps, info.first_step, info.run.log.steps
        self._began, self._is_new = time.monotonic(), True

    def on_step_begin(self, step: int) -> None:
        if not self._is_new:
            return
        self._began, self._is_new = time.monotonic(), False  # an evaluation may have come before the first step
        if self._terminal is not None and self._terminal.isatty():
            columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=Console(file=self._terminal))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._first, line="")

    def say(self, text: str) -> None:
        """One line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._terminal is not None:
            print(text, file=self._terminal, flush=True)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if metrics["loss"] is None:
            self.say(f"warning: step {step} is skipped: {metrics['skipped']}; the weights stay as they are")
        compiling = metrics.get("compile_seconds", 0.0)
        if compiling:
            self._began += compiling  # the steps to come will not take it
            self.say(f"step {step}: {compiling:.1f} of its {metrics['step_seconds']:.1f} s went into compiling blocks")
        eta = (time.monotonic() - self._began) / (step - self._first) * (self._total - step)
        line = describe(metrics, eta)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, line=line)
        elif step % self._log_steps == 0 or step == self._total:
            self.say(f"step {step}/{self._total}  {line}")

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        loss, num_tokens = metrics["eval_loss"], metrics["eval_tokens"]
        self.say(f"evaluation after step {metrics['step']}: loss {loss:.4f} over {num_tokens} tokens")

    def on_save(self, path: Path) -> None:
        self.say(f"saved {path}")

    def on_train_end(self, reason: str | None) -> None:
        self._close()
        if reason is not None:
            self.say(f"ended: {reason}")

    def on_exception(self, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(values: Mapping[str, Any], eta_seconds: float) -> str:
    """One line of the metrics as the terminal shows it."""
    if values["loss"] is None:
        return "skipped"
    parts = [
        f"loss {values['loss']:.4f}",
        f"norm {values['grad_norm']:.3f}",
        f"lr {values['lr']:.2e}",
        f"{format_count(values['tokens_per_second'])} tokens/s",
        f"{format_flops(values['tflops_per_device'] * 1e12)} a device",
        *([f"MFU {values['mfu']:.1%}"] if values["mfu"] is not None else []),
        format_bytes(values["peak_memory_bytes"]),
        f"ETA {format_seconds(eta_seconds)}",
    ]
    return "  ".join(parts)
