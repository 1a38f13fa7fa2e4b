"""What `shardwise estimate` prints: errors by source, or every row as data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.units import format_bytes


def show_estimates(answer: dict[str, Any], console: Console) -> None:
    """A line a row where nothing was measured or the table is short, else errors by source."""
    rows, found = answer["rows"], answer["summary"]
    if len(rows) <= _SHORT:
        console.print(_row_table(rows))
    for title, groups in (("step time", found["time_by_source"]), ("peak memory", found["memory_by_kind"])):
        if groups:
            console.print(_error_table(title, groups))
    lines = [(f"{kind}: step time", values) for kind, values in found["time"].items()]
    lines += [(f"{kind}, not the full configuration: step time", v) for kind, v in found["time_not_scored"].items()]
    for words, values in [*lines, ("peak memory", found["memory"])]:
        if values["rows"]:
            console.print(f"{words} of {_errors(values)}")
    if found["ranking"]["groups"]:
        loss, groups = found["ranking"]["mean_loss"], found["ranking"]["groups"]
        console.print(f"ranking: the predicted best costs {loss:.1%} more than the measured best ({groups} groups)")
    if found["skipped"]:
        console.print(f"{found['skipped']} of {found['rows']} rows skipped: {_reasons(rows)}")


_SHORT = 40  # rows that are shown one by one


def _row_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("id", "step", "measured", "memory", "measured", "longest terms", box=None)
    for row in rows:
        if row["skipped"]:
            table.add_row(row["id"], f"skipped: {row['skipped']}")
            continue
        terms = sorted(row["time_terms"].items(), key=lambda term: -term[1])[:3]
        table.add_row(
            row["id"],
            f"{row['step_seconds']:.3g} s",
            "" if row["measured_step_seconds"] is None else f"{row['measured_step_seconds']:.3g} s",
            format_bytes(row["memory_bytes"]),
            "" if row["measured_memory_bytes"] is None else format_bytes(row["measured_memory_bytes"]),
            ", ".join(f"{name} {seconds / row['step_seconds']:.0%}" for name, seconds in terms),
        )
    return table


def _error_table(title: str, groups: dict[str, dict[str, float]]) -> Table:
    table = Table(title, "rows", "mean error", "median, signed", "15 % too low", box=None)
    for name, values in groups.items():
        cells = (f"{values['mean_absolute']:.1%}", f"{values['median']:+.1%}", f"{values['share_15_low']:.0%}")
        table.add_row(name or "(not named)", str(values["rows"]), *cells)
    return table


def _errors(values: dict[str, float]) -> str:
    return f"{values['rows']} rows, mean absolute error {values['mean_absolute']:.1%}, median {values['median']:+.1%}"


def _reasons(rows: Sequence[dict[str, Any]]) -> str:
    """Each reason with the first row that it holds for."""
    reasons: dict[str, str] = {}
    for row in rows:
        if row["skipped"]:
            reasons.setdefault(row["skipped"], row["id"])
    shown = "; ".join(f"{name}: {reason}" for reason, name in list(reasons.items())[:3])
    return shown + ("; ..." if len(reasons) > 3 else "")


def show_calibration(found: dict[str, Any], path: Path, console: Console) -> None:
    """What a calibration found, and what it is worth."""
    numbers = ", ".join(f"{name} {found['stack'][name]:.4g}" for name in found["fitted"])
    console.print(f"fitted to {found['configurations']} configurations: {numbers}")
    console.print(f"step time as the profile came: {_errors(found['before'])}")
    console.print(f"step time of each run, predicted from the others: {_errors(found['after'])}")
    console.print(f"wrote {path}: plan with --cluster {path}")
