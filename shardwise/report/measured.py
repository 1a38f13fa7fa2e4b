"""What `shardwise measure` prints: what was timed, what follows from it, and how well the formulas fit."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.measure.profile import fits_of, profile_of
from shardwise.measure.samples import Samples


def measured_answer(samples: Samples, name: str) -> dict[str, Any]:
    """What `shardwise measure --json` gives; ``profile`` is what ``--cluster FILE`` takes."""
    fits = {
        label: {"values": fitted.values, "error": fitted.error, "samples": fitted.number}
        for label, fitted in fits_of(samples).items()
    }
    return {
        "schema": 1,
        "processes": samples.processes,
        "threads": samples.threads,
        "cores": samples.cores,
        "level": samples.level,
        "took_seconds": samples.took_seconds,
        "profile": profile_of(samples, name),
        "fits": fits,
        "samples": samples.to_json(),
    }


def show_measured(samples: Samples, console: Console) -> None:
    """A line a fit: its numbers, and the median error over its samples."""
    threads = f"{samples.threads} thread{'' if samples.threads == 1 else 's'}"
    console.print(
        f"{samples.processes} processes of {threads} at once on {samples.cores} cores, {samples.level}, "
        f"{samples.took_seconds:.0f} s"
    )
    table = Table("measured", "numbers", "samples", "median error", box=None)
    for label, fitted in fits_of(samples).items():
        values = ", ".join(f"{name} {_short(name, value)}" for name, value in fitted.values.items())
        table.add_row(label, values, str(fitted.number), f"{fitted.error:.0%}")
    table.add_row("least operator", f"{samples.operator_seconds * 1e6:.1f} us", "1", "")
    console.print(table)


def _short(name: str, value: float) -> str:
    if name in ("rate", "fastest"):
        return f"{value / 1e9:.1f} GFLOP/s"
    if name == "bandwidth":
        return f"{value / 1e9:.2f} GB/s"
    if name == "latency":
        return f"{value * 1e6:.0f} us"
    return f"{value:.3g}"
