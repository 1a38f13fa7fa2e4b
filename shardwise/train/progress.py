"""What the user sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shardwise.units import format_bytes, format_count, format_seconds


class ProgressView:
    """Shows steps on rank 0's terminal; silent on the other ranks (``terminal`` is None there)."""

    def __init__(self, terminal: TextIO | None, total_steps: int, log_steps: int, done_steps: int = 0) -> None:
        self._terminal, self._total, self._log_steps = terminal, total_steps, log_steps
        self._bar: Progress | None = None
        if terminal is not None and terminal.isatty():
            columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=Console(file=terminal))
            self._bar.start()
            self._task = self._bar.add_task("", total=total_steps, completed=done_steps, line="")

    def say(self, text: str) -> None:
        """One line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._terminal is not None:
            print(text, file=self._terminal, flush=True)

    def step(self, values: dict[str, object], eta_seconds: float) -> None:
        """Show one line of the metrics."""
        if self._terminal is None:
            return
        step = int(str(values["step"]))
        line = _describe(values, eta_seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, line=line)
        elif step % self._log_steps == 0 or step == self._total:
            self.say(f"step {step}/{self._total}  {line}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _describe(values: dict[str, object], eta_seconds: float) -> str:
    if values.get("loss") is None:
        return f"skipped: {values.get('skipped')}"
    return (
        f"loss {values['loss']:.4f}  norm {values['grad_norm']:.3f}  lr {values['lr']:.2e}  "
        f"{format_count(float(str(values['tokens_per_second'])))} tokens/s  "
        f"{format_bytes(float(str(values['peak_memory_bytes'])))}  ETA {format_seconds(eta_seconds)}"
    )
